#!/bin/sh
# python-openstackclient 10.3.0 with osc-lib 4.7.0 and openstacksdk 4.22.0 (PyPI): OS_CLOUD names a cloud of clouds.yaml, and
# the shell still has the OS_* variables of another cloud. openstacksdk, and thus Ansible and daemons, take all of the
# settings from the file. The command openstack takes project and region from the variables, and auth_url, user and
# password from the file: it works in another project or region of the same cloud, if the user may do that there. A search
# for leaked servers by `OS_CLOUD=prod openstack server list` shows the wrong servers, which a clean-up then deletes.
# Seen: "openstacksdk: prod prod ci two; openstack: prod prod sandbox one; openstack without the other variables: prod prod
# ci two" (on one line; host, user, project, region).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check python-openstackclient==10.3.0 osc-lib==4.7.0 \
    openstacksdk==4.22.0
cd "$work"
cat >clouds.yaml <<'END'
clouds:
  prod:
    auth:
      auth_url: https://prod.example/v3
      username: prod
      password: secret
      project_name: ci
      user_domain_name: Default
      project_domain_name: Default
    regions: [two, one]
END
cat >run.py <<'END'
import json
import os
import subprocess

import openstack.config

NAMED = {"PATH": os.environ["PATH"], "HOME": os.getcwd(), "OS_CLOUD": "prod"}
OTHER = {
    "OS_AUTH_URL": "https://test.example/v3",
    "OS_USERNAME": "test",
    "OS_PASSWORD": "other",
    "OS_PROJECT_NAME": "sandbox",
    "OS_USER_DOMAIN_NAME": "Default",
    "OS_PROJECT_DOMAIN_NAME": "Default",
    "OS_REGION_NAME": "one",
}


def short(auth, region):
    return f"{auth['auth_url'].split('/')[2].split('.')[0]} {auth['username']} {auth['project_name']} {region}"


def command(env):
    args = ["venv/bin/openstack", "configuration", "show", "-f", "json"]
    found = json.loads(subprocess.run(args, env=env, stdout=subprocess.PIPE, check=True).stdout)
    auth = {name.removeprefix("auth."): value for name, value in found.items() if name.startswith("auth.")}
    return short(auth, found["region_name"])


os.environ.clear()
os.environ.update(NAMED | OTHER)
config = openstack.config.OpenStackConfig().get_one().config
library = short(config["auth"], config["region_name"])
both, named = command(NAMED | OTHER), command(NAMED)
print(f"openstacksdk: {library}; openstack: {both}; openstack without the other variables: {named}")
END
venv/bin/python run.py | tee seen
first='openstacksdk: prod prod ci two; openstack: prod prod sandbox one'
grep -qx "$first; openstack without the other variables: prod prod ci two" seen
