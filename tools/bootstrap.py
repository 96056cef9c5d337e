"""Install missing Debian packages and create a virtual environment, for quickstart and run-tests.

Standard library only.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile

from progress import StepFailed, run_step
from system_services import left_as_they_are

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
VENV = REPOSITORY / ".venv"
#: The versions that passed all tests.
CONSTRAINTS = REPOSITORY / "tools" / "constraints.txt"
#: MiB that it takes.
VENV_MIB = 400
#: program -> Debian package that brings it.
PROGRAMS = {
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
    "nft": "nftables",
    "mkfs.ext4": "e2fsprogs",
    "losetup": "mount",
}
#: The same, for tests of images with containers.
CONTAINER_PROGRAMS = {"podman": "podman", "crun": "crun"}
FILES = {"/usr/sbin/sshd": "openssh-server"}
#: The same, for tools/zookeeper.
ZOOKEEPER_PROGRAMS = {"java": "default-jre-headless", "openssl": "openssl"}
ZOOKEEPER_FILES = {"/usr/share/java/zookeeper.jar": "zookeeper"}
#: The same, for building images with diskimage-builder.
IMAGE_PROGRAMS = {
    "debootstrap": "debootstrap",
    "qemu-img": "qemu-utils",
    "kpartx": "kpartx",
    "sgdisk": "gdisk",
    "mkfs.vfat": "dosfstools",
    "mksquashfs": "squashfs-tools",
    "sudo": "sudo",
    "ps": "procps",
    "lsb_release": "lsb-release",
    "mkfs.ext4": "e2fsprogs",
    "losetup": "mount",
    "xz": "xz-utils",
}
IMAGE_FILES = {"/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring"}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def old_python() -> str | None:
    """Return why this interpreter cannot be used; None: it can."""
    if sys.version_info >= (3, 11):  # noqa: UP036 - the scripts are started by whatever python3 there is
        return None
    return f"Python 3.11 or newer is needed; {sys.executable} is {sys.version.split()[0]}"


def missing_packages(images: bool, containers: bool = True, zookeeper: bool = True) -> list[str]:
    programs = {
        **PROGRAMS,
        **(IMAGE_PROGRAMS if images else {}),
        **(CONTAINER_PROGRAMS if containers else {}),
    }
    programs |= ZOOKEEPER_PROGRAMS if zookeeper else {}
    files = {**FILES, **(IMAGE_FILES if images else {}), **(ZOOKEEPER_FILES if zookeeper else {})}
    found = {package for program, package in programs.items() if shutil.which(program) is None}
    found |= {package for path, package in files.items() if not os.path.exists(path)}
    probe = subprocess.run(
        [sys.executable, "-c", "import ensurepip, venv"], capture_output=True, check=False
    )
    if probe.returncode:
        found.add("python3-venv")
    return sorted(found)


def _in_chroot() -> bool:
    """Return whether the root directory is not a mount point, as after ``chroot DIRECTORY``."""
    try:
        mounts = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    return not any(line.split()[4] == "/" for line in mounts)


def give_own_root() -> None:
    """In a chroot, continue in a private mount namespace in which its directory is the root.

    Slivers get their root by pivot_root, which the kernel refuses where the root is not a mount
    point.
    """
    if os.geteuid() != 0 or not _in_chroot():
        return
    clone_newns, private, bind, recursive, detach = 0x20000, 1 << 18, 0x1000, 0x4000, 2
    pivot_root = {"x86_64": 155, "aarch64": 41}.get(os.uname().machine)
    if pivot_root is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

    directory = os.getcwd()
    outside = tempfile.mkdtemp(dir="/")
    check(libc.unshare(clone_newns), "unshare")
    here = os.open("/", os.O_DIRECTORY)  # only now: it must be of the new namespace
    os.chroot(outside)
    os.fchdir(here)
    while not os.path.samefile(".", ".."):
        os.chdir("..")
    os.chroot(".")
    check(libc.mount(None, b"/", None, recursive | private, None), "mount /")
    os.fchdir(here)
    os.rmdir(os.path.basename(outside))
    root = os.getcwd()
    check(libc.mount(b".", b".", None, bind | recursive, None), f"mount {root}")
    os.chdir(root)
    check(libc.syscall(pivot_root, b".", b"."), "pivot_root")
    check(libc.umount2(b".", detach), "umount")
    os.close(here)
    os.chdir(directory)


def name_this_machine() -> None:
    """Let the name of this machine resolve, as Debian's installer does.

    Otherwise sudo complains with every call, and diskimage-builder takes the complaint for the name
    of a device.
    """
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
        return
    except OSError:
        pass
    if os.geteuid() != 0:
        sys.exit(
            "The name of this machine does not resolve; add it to /etc/hosts first: 127.0.1.1 "
            f"{name}"
        )
    say(f"Adding this machine's name, {name}, to /etc/hosts")
    old = (
        pathlib.Path("/etc/hosts").read_text()
        if os.path.exists("/etc/hosts")
        else "127.0.0.1\tlocalhost\n"
    )
    if old and not old.endswith("\n"):
        old += "\n"
    pathlib.Path("/etc/hosts").write_text(f"{old}127.0.1.1\t{name}\n")


def install_packages(
    images: bool = True,
    log: pathlib.Path | None = None,
    containers: bool = True,
    zookeeper: bool = True,
) -> None:
    """Install what is missing.

    :param images: also what building images needs.
    :param log: for what the tools print; default: a new file.
    :param containers: also podman, which only tests use.
    :param zookeeper: also the real ZooKeeper, with Java.

    :raises SystemExit: something is missing and we are not root, or it cannot be installed.
    """
    if images:
        name_this_machine()
    _install(missing_packages(images, containers, zookeeper), log)


def install(programs: dict[str, str]) -> None:
    """Install those of the programs (with the packages that bring them) that are missing.

    :param programs: names, or paths of files.
    :raises SystemExit: something is missing and we are not root, or it cannot be installed.
    """
    missing = {
        package
        for name, package in programs.items()
        if not (os.path.exists(name) if "/" in name else shutil.which(name))
    }
    _install(sorted(missing), None)


def _log(log: pathlib.Path | None) -> pathlib.Path:
    """Return the file of the details; its path is printed at the first use."""
    if log is None:
        handle, name = tempfile.mkstemp(prefix="nodepool-setup-", suffix=".log")
        os.close(handle)
        log = pathlib.Path(name)
    elif log.exists():
        return log
    say(f"Something has to be prepared; details go to {log}")
    return log


def _install(packages: list[str], log: pathlib.Path | None) -> None:
    if not packages:
        return
    command = f"apt-get install {' '.join(packages)}"
    if shutil.which("apt-get") is None:
        sys.exit(
            "There is no apt-get here: what is missing has to be installed by hand; Debian calls "
            f"it {', '.join(packages)}"
        )
    if os.geteuid() != 0:
        sys.exit(f"These packages are missing; install them first: {command}")
    log = _log(log)
    environment = dict(
        os.environ, DEBIAN_FRONTEND="noninteractive", NEEDRESTART_SUSPEND="1", LC_ALL="C"
    )
    install = ["apt-get", "install", "--no-install-recommends", *packages]
    try:
        run_step(
            "Asking the Debian mirror what there is",
            [["apt-get", "update"]],
            log,
            environment=environment,
        )
        plan = subprocess.run(
            [*install, "--assume-no"],
            check=False,
            capture_output=True,
            text=True,
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=300,
        ).stdout
        say(
            f"Missing: {', '.join(packages)}.{_extent(plan)} No service of them is started or "
            "enabled; they stay installed."
        )
        with left_as_they_are():
            run_step(
                f"Installing {len(packages)} Debian packages and what they need",
                [[*install, "-y"]],
                log,
                environment=environment,
            )
    except StepFailed as failure:
        sys.exit(f"{explain(failure.output, 'the Debian mirror')} All that was printed: {log}")


def _extent(plan: str) -> str:
    """Return how much apt is about to install, as apt prints it."""
    found = re.search(r"(\d+) newly installed", plan)
    sizes = re.search(r"Need to get (.*?) of archives|Need to get \S+/?(.*?) of archives", plan)
    disk = re.search(r"After this operation, (.*?) of additional disk space", plan)
    parts = [f" With what they need {found[1]} packages"] if found else []
    parts += [f"{sizes[1] or sizes[2]} to fetch"] if sizes else []
    parts += [f"{disk[1]} on disk"] if disk else []
    return f"{', '.join(parts)}." if parts else ""


#: What a tool prints -> what is wrong.
_NO_ROOM = re.compile("No space left on device|enough free space")
_BUSY = re.compile("Could not get lock|is another process using it")
_NO_ANSWER = re.compile(
    "Temporary failure (resolving|in name resolution)|Could not resolve|Could not connect|Failed "
    "to fetch|Connection failed|"
    "Network is unreachable|Connection refused|Connection timed "
    "out|NewConnectionError|ConnectTimeoutError|Read timed out|"
    "Failed to establish a new connection|No route to host|No matching distribution found|Unable "
    "to locate package|"
    "has no installation candidate|ProxyError|no end within"
)


def explain(output: str, source: str) -> str:
    """Return what went wrong, in one sentence."""
    last = next(
        (line.strip() for line in reversed(output.splitlines()) if line.strip()),
        "nothing was printed",
    )
    if _NO_ROOM.search(output):
        return "There is not enough disk space: free some and start again."
    if _BUSY.search(output):
        return "Another program is installing packages; wait for its end and start again."
    if _NO_ANSWER.search(output):
        return (
            f"{source[0].upper()}{source[1:]} cannot be reached, or does not have what is needed. "
            "Check the network, and set a proxy if there is one"
        )
    return f"It failed: {last[:300]}"


def virtual_environment(extras: str = "", log: pathlib.Path | None = None) -> pathlib.Path:
    """Create or update the virtual environment in .venv; return its python.

    :raises SystemExit: it cannot be created.
    """
    problem = old_python()
    if problem is not None:
        sys.exit(problem)
    python = VENV / "bin" / "python"
    content = b"".join(file.read_bytes() for file in (REPOSITORY / "setup.cfg", CONSTRAINTS))
    wanted = hashlib.sha256(content + extras.encode()).hexdigest()
    stamp = VENV / f"installed-{extras or 'plain'}"
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    free = shutil.disk_usage(REPOSITORY).free / 2**20
    if not python.exists() and free < VENV_MIB:
        sys.exit(
            f"{REPOSITORY} has {free:.0f} MiB free; the virtual environment in .venv takes "
            f"{VENV_MIB} MiB"
        )
    log = _log(log)
    target = f"{REPOSITORY}[{extras}]" if extras else str(REPOSITORY)
    commands = [] if python.exists() else [[sys.executable, "-m", "venv", str(VENV)]]
    commands.append(
        [
            str(python),
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--retries",
            "2",
            "-c",
            str(CONSTRAINTS),
            "-e",
            target,
        ]
    )
    try:
        run_step(f"Python packages from PyPI into {VENV} (about 200 MB)", commands, log)
    except StepFailed as failure:
        sys.exit(f"{explain(failure.output, 'PyPI')} All that was printed: {log}")
    stamp.write_text(wanted)
    return python
