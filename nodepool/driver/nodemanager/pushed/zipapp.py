"""The node manager as one file for any Python, with its pure Python packages (NM-C.8)."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import nodepool

#: Modules of our own package that are included; all others belong to launchers and builders.
OWN = ("*.py", "base/*.py", "process/*.py", "nodemanager/**/*.py", "zk/**/*.py")
#: Other packages that the node manager imports; compiled parts are optional and only faster.
PACKAGES = ("voluptuous", "yaml", "kazoo")
MAIN = "from nodepool.nodemanager.pushed.program import main\n\nraise SystemExit(main())\n"
SKIPPED = frozenset({"tests", "testing", "__pycache__"})


class Code(NamedTuple):
    digest: str
    """SHA-256 of the content, in hexadecimal."""
    content: bytes


def _files() -> Iterator[tuple[str, Path]]:
    own = Path(nodepool.__file__).parent
    for pattern in OWN:
        for path in own.glob(pattern):
            yield f"nodepool/{path.relative_to(own)}", path
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise RuntimeError(
                f"Python package {name} is not installed here, and backing nodes need it"
            )
        folder = Path(spec.origin).parent
        for path in folder.rglob("*.py"):
            if not SKIPPED.intersection(path.relative_to(folder).parts):
                yield f"{name}/{path.relative_to(folder)}", path


@functools.cache
def build() -> Code:
    """Build the zip file once per process; one installation always yields the same bytes.

    :raises RuntimeError: a package is missing.
    """
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, path in sorted(_files()):
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
        archive.writestr(zipfile.ZipInfo("__main__.py"), MAIN)
    content = stream.getvalue()
    return Code(hashlib.sha256(content).hexdigest(), content)


#: Stores that file on the other machine and executes it. Standard input: a line of JSON
#: (``sha256``, ``size``, ``base``), the file when the answer is ``send``, then the input of the
#: file's program.
LOADER = """
import fcntl, hashlib, json, os, sys

def read(size):
    data = b""
    while len(data) < size:
        part = os.read(0, min(size - len(data), 1 << 20))
        if not part:
            sys.exit("the launcher has disconnected")
        data += part
    return data

def report(state, **more):
    os.write(1, b"nodepool:" + json.dumps({"state": state, **more}).encode() + b"\\n")

line = b""
while not line.endswith(b"\\n"):
    line += read(1)
job = json.loads(line)
if sys.version_info < (3, 11):
    report("failed", text="Python 3.11 or newer is needed, this is " + sys.version.split()[0])
    sys.exit(1)
try:
    os.umask(0o022)
    base = job["base"] or ("/var/lib/nodepool-backing" if os.geteuid() == 0
                           else os.path.expanduser("~/.local/state/nodepool-backing"))
    while True:
        os.makedirs(base, 0o711, exist_ok=True)
        status = os.stat(base)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise OSError(base + " belongs to, or can be changed by, another user")
        lock = os.open(base + "/.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            if os.path.samestat(os.fstat(lock), os.stat(base + "/.lock")):
                break
        except FileNotFoundError:
            pass
        os.close(lock)
    os.makedirs(base + "/code", 0o711, exist_ok=True)
    path = base + "/code/" + job["sha256"] + ".zip"
    try:
        with open(path, "rb") as file:
            known = hashlib.sha256(file.read()).hexdigest() == job["sha256"]
    except FileNotFoundError:
        known = False
    if known:
        report("have")
    else:
        report("send")
        data = read(job["size"])
        if hashlib.sha256(data).hexdigest() != job["sha256"]:
            raise OSError("the node manager arrived damaged")
        new = "%s.%d" % (path, os.getpid())
        with open(new, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
except OSError as error:
    report("failed", text=str(error))
    sys.exit(1)
os.set_inheritable(lock, True)
environment = {**os.environ, "PYTHONPATH": path, "NODEPOOL_PUSHED_LOCK": str(lock)}
environment["LC_ALL"] = "C.UTF-8"
program = [sys.executable, "-s", "-m", "nodepool.nodemanager.pushed.program"]
os.execve(sys.executable, program, environment)
"""
