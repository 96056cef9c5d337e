#!/bin/sh
# pexpect 4.9.0 (PyPI): run() "runs the given command; waits for it to finish", and returns its output and status. A command
# that exceeds the timeout, by default 30 seconds, is ended by SIGHUP, without an error. The output is what the command
# has written until then, and the status is None, as for a command that another program has killed. "if status:" takes both
# for a success. Without withexitstatus=True, the caller gets a part of the output only.
# Seen: "exit 3: a, status 3; timeout: a, status None; killed: a, status None; for 'if status' failed: exit 3; lines without
# status: 1 of 2" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check pexpect==4.9.0 ptyprocess==0.7.0
cat >"$work/run.py" <<'END'
import pexpect

# A command that is not ended writes its second line and exits with 0.
SLOW = "sh -c 'echo a; sleep 60; echo b'"


def outcome(command, **options):
    output, status = pexpect.run(command, withexitstatus=True, encoding="utf-8", **options)
    return ",".join(output.split()), status


outcomes = {
    "exit 3": outcome("sh -c 'echo a; exit 3'"),
    "timeout": outcome(SLOW, timeout=2),
    "killed": outcome("sh -c 'echo a; kill -9 $$'"),
}
seen = "; ".join(f"{name}: {output}, status {status}" for name, (output, status) in outcomes.items())
failed = ", ".join(name for name, (_, status) in outcomes.items() if status)
lines = pexpect.run(SLOW, timeout=2).split()
print(f"{seen}; for 'if status' failed: {failed}; lines without status: {len(lines)} of 2")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
seen="exit 3: a, status 3; timeout: a, status None; killed: a, status None; for 'if status' failed: exit 3"
grep -qxF "$seen; lines without status: 1 of 2" "$work/seen"
