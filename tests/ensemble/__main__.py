"""Start a run in separate process, network and mount namespaces, which end with this program."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from tests.conftest import load_tool
from tests.ensemble.options import arguments
from tests.support import others

#: Control groups that can limit writes, by the version of the kernel's interface.
GROUPS = ("/sys/fs/cgroup/blkio", "/sys/fs/cgroup")
LIMITS = ("blkio.throttle.write_iops_device", "io.max")
#: Removes the folder and the control group when the last process of the run has ended, however.
JANITOR = 'trap "" INT TERM; cat; [ -z "$1" ] || rmdir "$1"; [ -n "$2" ] || rm -rf "$0"'
NAMESPACES = ("--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")


def make_group() -> str:
    """Return a control group that can limit writes; empty without one."""
    for parent in GROUPS:
        folder = pathlib.Path(parent, f"nodepool-ensemble-{os.getpid()}")
        try:
            folder.mkdir()
        except OSError:
            continue
        if any((folder / limit).exists() for limit in LIMITS):
            return str(folder)
        folder.rmdir()
    return ""


@contextmanager
def janitor(folder: str, group: str, keep: bool) -> Iterator[int]:
    """Yield a file descriptor for the process that waits for the end of all others of the run;
    when both have ended, the folder and the group are removed, also if this one was killed.
    """
    read, write = os.pipe()
    words = ["sh", "-c", JANITOR, folder, group, "keep" if keep else ""]
    process = subprocess.Popen(words, stdin=read, start_new_session=True)
    os.close(read)
    try:
        yield write
    finally:
        os.close(write)
        process.wait(60)


def main() -> int:
    args = arguments()
    if os.geteuid() != 0:
        sys.exit("tools/ensemble: network namespaces need root")
    # What the run cannot download from inside its network.
    load_tool("zookeeper").install()
    load_tool("linearizable").build()
    others.environment()
    folder, group = tempfile.mkdtemp(prefix="nodepool-ensemble-"), make_group()
    # The first process of the namespace ends when nobody can write here any more, and with it all
    # others. Only then does ``unshare`` end, and only then may the janitor remove the folder:
    # ``unshare`` must survive the death of this process.
    lifeline, life = os.pipe()
    with janitor(folder, group, args.keep) as pipe:
        command = ["unshare", *NAMESPACES, sys.executable, "-m", "tests.ensemble.inside"]
        command += [*sys.argv[1:], "--folder", folder, *(["--throttle", group] if group else [])]
        command += ["--lifeline", str(lifeline)]
        child = subprocess.Popen(command, pass_fds=[pipe, lifeline])
        try:
            return child.wait()
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        finally:
            os.close(life)
            child.wait()
            if args.keep:
                print(f"Kept: {folder}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
