#!/bin/sh
# oslo.concurrency 7.6.1, fasteners 0.20, filelock 4.3.1 and portalocker 3.2.0 (PyPI), with flock of util-linux: two programs
# that lock one file both get the lock, if one of them uses external locks of oslo.concurrency (or fasteners, by which they
# are made) and the other one filelock, portalocker or the command flock, as elements of diskimage-builder do: Linux keeps
# locks of fcntl() and of flock() apart. Both kinds are exclusive among themselves, so that a test with one library shows
# nothing. The documentation of oslo.concurrency does not name the kind.
# Seen: "held by oslo.concurrency: fasteners refused, filelock locked, portalocker locked, flock locked; held by flock:
# fasteners locked, filelock refused, portalocker refused, flock refused" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check oslo.concurrency==7.6.1 fasteners==0.20 \
    filelock==4.3.1 portalocker==3.2.0
cat >"$work/run.py" <<'END'
import subprocess
import sys

from oslo_concurrency import lockutils

FILE = f"{sys.argv[1]}/images"
PROGRAMS = {
    "fasteners": "import fasteners; sys.exit(not fasteners.InterProcessLock(file).acquire(blocking=False))",
    "filelock": "import filelock; filelock.FileLock(file).acquire(timeout=0)",
    "portalocker": "import portalocker; portalocker.Lock(file, timeout=0, fail_when_locked=True).acquire()",
}


def others():
    commands = {
        name: [sys.executable, "-c", f"import sys; file = {FILE!r}; {text}"] for name, text in PROGRAMS.items()
    }
    commands["flock"] = ["flock", "--nonblock", FILE, "true"]
    return ", ".join(
        f"{name} {'refused' if subprocess.run(command, stderr=subprocess.DEVNULL).returncode else 'locked'}"
        for name, command in commands.items()
    )


with lockutils.external_lock("images", lock_path=sys.argv[1]):
    seen = f"held by oslo.concurrency: {others()}"
holder = subprocess.Popen(["flock", FILE, "sh", "-c", "echo locked; cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
assert holder.stdout.readline() == b"locked\n"
print(f"{seen}; held by flock: {others()}")
holder.communicate()
END
mkdir "$work/locks"
"$work/venv/bin/python" "$work/run.py" "$work/locks" | tee "$work/seen"
first='held by oslo.concurrency: fasteners refused, filelock locked, portalocker locked, flock locked'
grep -qx "$first; held by flock: fasteners locked, filelock refused, portalocker refused, flock refused" "$work/seen"
