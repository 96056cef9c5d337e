"""The image of tools/quickstart: what it needs on this machine and in the configuration."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # tools/release.py runs without our package
    from nodepool.zk.records import ImageBuild, ImageUpload

IMAGE = "debian"
RELEASE = "bookworm"
#: The mirrors that diskimage-builder can be given, and the public archive that it uses otherwise.
ARCHIVES = {
    "DIB_DISTRIBUTION_MIRROR": "deb.debian.org/debian",
    "DIB_DEBIAN_SECURITY_MIRROR": "security.debian.org",
}
#: What diskimage-builder needs for a Debian tree in a tar file.
PROGRAMS = {
    "debootstrap": "debootstrap",
    "sudo": "sudo",
    "lsb_release": "lsb-release",
    "ps": "procps",
    "qemu-img": "qemu-utils",
    "mksquashfs": "squashfs-tools",
}


def say(text: str) -> None:
    print(text, flush=True)


def obstacle() -> str | None:
    """Return why no image can be built here; None: it can."""
    if os.geteuid() != 0:
        return "building an image needs root"
    missing = sorted(
        {package for program, package in PROGRAMS.items() if shutil.which(program) is None}
    )
    if missing:
        return f"missing packages: {', '.join(missing)}"
    return None


def apt_mirrors(sources: str) -> dict[str, str]:
    """Return the Debian mirrors that apt of this machine uses, for diskimage-builder.

    :param sources: text of the sources lists, either format.
    """
    found: dict[str, str] = {}
    for url in re.findall(
        r"^(?:URIs:|deb(?:\s+\[[^\]]*\])?)\s+(https?://\S+)", sources, re.MULTILINE
    ):
        url = url.rstrip("/")
        if url.endswith("/debian-security"):
            found.setdefault("DIB_DEBIAN_SECURITY_MIRROR", url)
        elif url.endswith("/debian"):
            found.setdefault("DIB_DISTRIBUTION_MIRROR", url)
    return found


def read_apt_sources() -> str:
    files = [
        pathlib.Path("/etc/apt/sources.list"),
        *sorted(pathlib.Path("/etc/apt/sources.list.d").glob("*")),
    ]
    return "\n".join(f.read_text(errors="replace") for f in files if f.is_file())


def loop_devices(work: pathlib.Path) -> list[str]:
    """Return the loop devices of files in the working directory, and how to remove them."""
    found = []
    for path in pathlib.Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # it goes at this moment
            if str(work) in path.read_text():
                found.append(f"loop device: losetup -d /dev/{path.parent.parent.name}")
    return found


def missing_mirrors(mirrors: dict[str, str]) -> str | None:
    """Return one line about archives that apt of this machine does not name; None: it names all."""
    missing = [host for variable, host in ARCHIVES.items() if variable not in mirrors]
    if not missing:
        return None
    return (
        f"The apt sources of this machine name no mirror of {' and '.join(missing)}, so the build "
        "uses the public one; "
        "in a closed network, add it to the apt sources first"
    )


def settings(work: pathlib.Path) -> dict[str, Any]:
    """Return what the image adds to the configuration."""
    images = work / "images"
    images.mkdir()
    mirrors = apt_mirrors(read_apt_sources())
    if (note := missing_mirrors(mirrors)) is not None:
        say(note)
    return {
        "images-dir": str(images),
        "build-log-dir": str(work / "build-logs"),
        "diskimages": [
            {
                "name": IMAGE,
                "elements": ["debian-minimal", "openssh-server"],
                "release": RELEASE,
                "username": "root",
                "env-vars": {
                    "DIB_DEBIAN_USE_DEBOOTSTRAP_CACHE": "0",
                    "DIB_IMAGE_CACHE": str(work / "dib-cache"),
                    **mirrors,
                },
            }
        ],
    }


def summary(work: pathlib.Path, build: ImageBuild, upload: ImageUpload) -> dict[str, Any]:
    """Return what ``--json`` shows of the build that was uploaded."""
    return {
        "name": IMAGE,
        "formats": build.formats,
        "state": build.state,
        "bytes": (work / "images" / f"{IMAGE}-{build.id}.tar").stat().st_size,
        "uploads": [upload.provider_name],
    }
