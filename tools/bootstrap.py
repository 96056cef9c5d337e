"""What quickstart and run-tests share: missing Debian packages and a virtual environment. Standard library only."""

from __future__ import annotations

import ctypes
import hashlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
VENV = REPOSITORY / ".venv"
#: program -> Debian package that brings it.
PROGRAMS = {"java": "default-jre-headless", "openssl": "openssl", "ssh": "openssh-client", "ssh-keygen": "openssh-client",
            "ip": "iproute2", "nft": "nftables", "mkfs.ext4": "e2fsprogs", "losetup": "mount", "podman": "podman", "crun": "crun"}
FILES = {"/usr/share/java/zookeeper.jar": "zookeeper", "/usr/sbin/sshd": "openssh-server"}
#: The same, for building images with diskimage-builder.
IMAGE_PROGRAMS = {"debootstrap": "debootstrap", "qemu-img": "qemu-utils", "kpartx": "kpartx", "sgdisk": "gdisk",
                  "mkfs.vfat": "dosfstools", "mksquashfs": "squashfs-tools", "sudo": "sudo", "ps": "procps",
                  "lsb_release": "lsb-release", "mkfs.ext4": "e2fsprogs", "losetup": "mount", "xz": "xz-utils"}
IMAGE_FILES = {"/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring"}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def missing_packages(images: bool) -> list[str]:
    programs = {**PROGRAMS, **(IMAGE_PROGRAMS if images else {})}
    files = {**FILES, **(IMAGE_FILES if images else {})}
    found = {package for program, package in programs.items() if shutil.which(program) is None}
    found |= {package for path, package in files.items() if not os.path.exists(path)}
    probe = subprocess.run([sys.executable, "-c", "import ensurepip, venv"], capture_output=True, check=False)
    if probe.returncode:
        found.add("python3-venv")
    return sorted(found)


def _in_chroot() -> bool:
    """Whether the root directory is no mount point, as after ``chroot DIRECTORY``."""
    try:
        mounts = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    return not any(line.split()[4] == "/" for line in mounts)


def give_own_root() -> None:
    """In a chroot, go on in a private mount namespace in which its directory is the root.

    Slivers get roots of their own by pivot_root, which the kernel refuses where the root is no mount point.
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
    """Make sure that the machine's own name resolves, as Debian's installer does.

    Else sudo complains with every call, and diskimage-builder takes the complaint for the name of a device.
    """
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
        return
    except OSError:
        pass
    if os.geteuid() != 0:
        sys.exit(f"The name of this machine does not resolve; add it to /etc/hosts first: 127.0.1.1 {name}")
    say(f"Adding this machine's name, {name}, to /etc/hosts")
    old = pathlib.Path("/etc/hosts").read_text() if os.path.exists("/etc/hosts") else "127.0.0.1\tlocalhost\n"
    if old and not old.endswith("\n"):
        old += "\n"
    pathlib.Path("/etc/hosts").write_text(f"{old}127.0.1.1\t{name}\n")


def install_packages(images: bool = True) -> None:
    """Install what is missing.

    :param images: also what building images needs.

    :raises SystemExit: something is missing and we are not root.
    """
    if images:
        name_this_machine()
    _install(missing_packages(images))


def install(programs: dict[str, str]) -> None:
    """Install those of the programs (with the packages that bring them) that are missing.

    :raises SystemExit: something is missing and we are not root.
    """
    _install(sorted({package for program, package in programs.items() if shutil.which(program) is None}))


def _install(packages: list[str]) -> None:
    if not packages:
        return
    command = f"apt-get install {' '.join(packages)}"
    if os.geteuid() != 0:
        sys.exit(f"These packages are missing; install them first: {command}")
    say(f"Installing {', '.join(packages)}")
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    for step in (["apt-get", "update", "-qq"],
                 ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]):
        subprocess.run(step, check=True, env=environment, stdout=sys.stderr, timeout=1800)


def virtual_environment(extras: str = "") -> pathlib.Path:
    """Make (or bring up to date) the virtual environment in .venv; returns its python."""
    if sys.version_info < (3, 11):  # noqa: UP036 - the scripts are started by whatever python3 there is
        sys.exit(f"Python 3.11 or newer is needed; {sys.executable} is {sys.version.split()[0]}")
    python = VENV / "bin" / "python"
    wanted = hashlib.sha256((REPOSITORY / "setup.cfg").read_bytes() + extras.encode()).hexdigest()
    stamp = VENV / f"installed-{extras or 'plain'}"
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    say("Preparing the virtual environment")
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True, timeout=300)
    target = f"{REPOSITORY}[{extras}]" if extras else str(REPOSITORY)
    subprocess.run([str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-e", target],
                   check=True, stdout=sys.stderr, timeout=1800)
    stamp.write_text(wanted)
    return python
