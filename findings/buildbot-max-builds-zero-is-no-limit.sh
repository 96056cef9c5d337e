#!/bin/sh
# buildbot and buildbot-worker 4.3.0 (PyPI): a worker with max_builds=0 takes any number of builds at the same time, as
# with None: the limit is checked only if it is true in Python's sense. An operator who sets the maximum number of
# simultaneous builds to 0 to drain a worker removes the limit instead. Checkconfig accepts the value without a warning.
# Seen: "most builds at a time: 1 with max_builds=1, 2 with max_builds=0".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check buildbot==4.3.0 buildbot-worker==4.3.0
cd "$work"
venv/bin/buildbot create-master --quiet master
cat >master/master.cfg <<'END'
from buildbot.plugins import schedulers, steps, util, worker


def factory(name):
    script = f"echo begin >>{basedir}/{name}; sleep 3; echo end >>{basedir}/{name}"
    return util.BuildFactory([steps.ShellCommand(command=["sh", "-c", script])])


names = [(f"max-{limit}", limit) for limit in (0, 1)]
builders = [
    util.BuilderConfig(name=f"{name}-{number}", workernames=[name], factory=factory(name))
    for name, _ in names
    for number in (1, 2)
]
BuildmasterConfig = {
    "workers": [worker.LocalWorker(name, max_builds=limit) for name, limit in names],
    "builders": builders,
    "schedulers": [
        schedulers.Periodic(name="once", builderNames=[each.name for each in builders], periodicBuildTimer=86400)
    ],
    "protocols": {"null": {}},
    "db": {"db_url": "sqlite:///state.sqlite"},
    "buildbotNetUsageData": None,
}
END
venv/bin/buildbot checkconfig --quiet master
venv/bin/buildbot start --nodaemon master >output 2>&1 &
master=$!
trap 'kill "$master" 2>/dev/null || :; wait "$master" 2>/dev/null || :; rm -rf "$work"' EXIT
for _ in $(seq 60); do
    [ "$(cat master/max-0 master/max-1 2>/dev/null | grep -c end)" = 4 ] && break
    sleep 1
done
most() {
    awk '{ now += ($1 == "begin") ? 1 : -1; if (now > most) most = now } END { print most }' "master/max-$1"
}
echo "most builds at a time: $(most 1) with max_builds=1, $(most 0) with max_builds=0" | tee "$work/seen"
grep -qx 'most builds at a time: 1 with max_builds=1, 2 with max_builds=0' "$work/seen"
