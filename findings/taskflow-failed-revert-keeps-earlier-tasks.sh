#!/bin/sh
# taskflow 6.5.0 (PyPI), with which Octavia and Cinder create their resources: when a task fails, the engine reverts the tasks
# that ran before. If one of the reverts fails (a port that is in use cannot be deleted, for example), the earlier tasks
# are not reverted at all, and what they have created remains: here a server and a volume. Only the error of the revert is
# raised. The error of the task that has failed is lost, it is not even its cause.
# Seen: "reverts work: attach, port, server, volume; RuntimeError quota; revert of port fails: attach, port; states server
# SUCCESS, volume SUCCESS; ValueError in use, cause None, context None" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check taskflow==6.5.0
cat >"$work/run.py" <<'END'
from taskflow import engines, task
from taskflow.patterns import linear_flow

reverted = []


class Create(task.Task):
    in_use = False

    def execute(self):
        return self.name

    def revert(self, result, **_arguments):
        reverted.append(self.name)
        if self.in_use:
            raise ValueError("in use")


class Attach(Create):
    def execute(self):
        raise RuntimeError("quota")


def run(in_use):
    reverted.clear()
    port = Create("port")
    port.in_use = in_use
    engine = engines.load(linear_flow.Flow("node").add(Create("volume"), Create("server"), port, Attach("attach")))
    try:
        engine.run()
        error = None
    except Exception as caught:
        error = caught
    return ", ".join(reverted), error, engine.storage


names, error, _ = run(False)
seen = f"reverts work: {names}; {type(error).__name__} {error}"
names, error, storage = run(True)
states = ", ".join(f"{name} {storage.get_atom_state(name)}" for name in ("server", "volume"))
seen += f"; revert of port fails: {names}; states {states}; {type(error).__name__} {error}"
print(f"{seen}, cause {error.__cause__}, context {error.__context__}")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
first='reverts work: attach, port, server, volume; RuntimeError quota; revert of port fails: attach, port'
grep -qxF "$first; states server SUCCESS, volume SUCCESS; ValueError in use, cause None, context None" "$work/seen"
