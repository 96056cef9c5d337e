#!/bin/sh
# buildbot, buildbot-www and buildbot-worker 4.3.0 (PyPI): "total" in the answers of the REST API is documented as the number
# of resources in the collection. With "limit", that is so for builders. For builds it is the number of those in the answer,
# so that a program that reads pages until it has "total" of them ends after the first one. The second surprise of the same
# list: results__ne=0, documented as inequality, omits builds that still run, whose results are null: together with
# results=0, these are not all builds.
# Seen: "builders: 3, with limit 1: total 3; builds: 3, with limit 1: total 1; results=0: 1, results__ne=0: 1 of 2".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check buildbot==4.3.0 buildbot-www==4.3.0 buildbot-worker==4.3.0
cd "$work"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
venv/bin/buildbot create-master --quiet master
cat >master/master.cfg <<END
from buildbot.plugins import schedulers, steps, util, worker

COMMANDS = {"good": "true", "bad": "false", "long": "sleep 100"}


def builder(name):
    return util.BuilderConfig(
        name=name,
        workernames=["here"],
        factory=util.BuildFactory([steps.ShellCommand(command=COMMANDS[name].split())]),
    )


BuildmasterConfig = {
    "protocols": {"null": {}},
    "workers": [worker.LocalWorker("here")],
    "builders": [builder(name) for name in COMMANDS],
    "schedulers": [schedulers.ForceScheduler(name="force", builderNames=list(COMMANDS))],
    "www": {"port": "tcp:$port:interface=127.0.0.1"},
    "buildbotNetUsageData": None,
}
END
venv/bin/buildbot start --nodaemon master >output 2>&1 &
master=$!
trap 'kill "$master" 2>/dev/null || :; wait "$master" 2>/dev/null || :; rm -rf "$work"' EXIT
cat >run.py <<'END'
import json
import sys
import time
import urllib.request

URL = f"http://127.0.0.1:{sys.argv[1]}/api/v2/"


def call(path, body=None):
    headers = {"Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(URL + path, data, headers), timeout=10) as answer:
        return json.load(answer)


def wait(done):
    end = time.monotonic() + 60
    while True:
        try:
            if done():
                return
        except OSError:
            pass
        assert time.monotonic() < end
        time.sleep(0.5)


wait(lambda: len(call("builders")["builders"]) == 3 and call("forceschedulers")["forceschedulers"])
for builder in call("builders")["builders"]:
    params = {"builderid": builder["builderid"]}
    call("forceschedulers/force", {"id": 1, "jsonrpc": "2.0", "method": "force", "params": params})
wait(lambda: sorted(str(build["results"]) for build in call("builds")["builds"]) == ["0", "2", "None"])


def collection(name):
    page = call(f"{name}?limit=1")
    assert len(page[name]) == 1
    return f"{name}: {len(call(name)[name])}, with limit 1: total {page['meta']['total']}"


passed, others = (len(call(f"builds?{query}=0")["builds"]) for query in ("results", "results__ne"))
print(f"{collection('builders')}; {collection('builds')}; results=0: {passed}, results__ne=0: {others} of 2")
END
python3 run.py "$port" | tee seen
first='builders: 3, with limit 1: total 3; builds: 3, with limit 1: total 1'
grep -qx "$first; results=0: 1, results__ne=0: 1 of 2" seen
