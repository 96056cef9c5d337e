#!/bin/sh
# cloud-init 22.4.2 (Debian 12), run by PyYAML 6.0.2 and others from PyPI: the items of runcmd, documented to be run by sh or
# "as if passed to execve", are the lines of one script. If one fails, the next ones run, and cloud-init reports an error
# only if the last one fails. An "exit 0" in an item skips all that follow. A node whose first command (the installation of
# its worker) failed ends as "done", and cloud-init status --wait lets it be used.
# Seen: "false, true: no error; true, false: error; exit 0, false: no error; set -e, false, true: error".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
(apt-get -q download cloud-init=22.4.2-1+deb12u4 && dpkg-deb -x cloud-init_*.deb root) >log 2>&1 || { cat log; exit 1; }
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check PyYAML==6.0.2 Jinja2==3.1.6 jsonschema==4.23.0 jsonpatch==1.33 \
    configobj==5.0.9 oauthlib==3.2.2 requests==2.32.3
export PYTHONPATH=root/usr/lib/python3/dist-packages
cat >run.py <<'END'
import logging
import pathlib
import types

from cloudinit.config import cc_runcmd, cc_scripts_user

scripts = pathlib.Path("instance/scripts").absolute()
scripts.mkdir(parents=True)
cloud = types.SimpleNamespace(get_ipath_cur=lambda: str(scripts.parent), get_ipath=lambda _name: str(scripts))
log = logging.getLogger("cloudinit")
log.addHandler(logging.NullHandler())
seen = []
for commands in (["false", ["true"]], ["true", ["false"]], ["exit 0", ["false"]], ["set -e", ["false"], "true"]):
    cc_runcmd.handle("runcmd", {"runcmd": commands}, cloud, log, [])
    try:
        cc_scripts_user.handle("scripts-user", {}, cloud, log, [])
        result = "no error"
    except RuntimeError:
        result = "error"
    names = ", ".join(each if isinstance(each, str) else each[0] for each in commands)
    seen.append(f"{names}: {result}")
print("; ".join(seen))
END
venv/bin/python run.py 2>log | tee seen || cat log
grep -qx 'false, true: no error; true, false: error; exit 0, false: no error; set -e, false, true: error' seen
