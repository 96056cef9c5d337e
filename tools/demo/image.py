"""The image part of tools/quickstart: a real builder, a real diskimage-builder image, live progress."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import Any

from progress import step

IMAGE = "debian"
RELEASE = "bookworm"
BUILD_TIMEOUT = 1500.0
UPLOAD_TIMEOUT = 60.0
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
    """Why no image can be built here; None when it can."""
    if os.geteuid() != 0:
        return "building an image needs root"
    missing = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    if missing:
        return f"missing packages: {', '.join(missing)}"
    return None


def apt_mirrors(sources: str) -> dict[str, str]:
    """The Debian mirrors that apt of this machine uses, for diskimage-builder.

    :param sources: text of the sources lists, either format.
    """
    found: dict[str, str] = {}
    for url in re.findall(r"^(?:URIs:|deb(?:\s+\[[^\]]*\])?)\s+(https?://\S+)", sources, re.MULTILINE):
        url = url.rstrip("/")
        if url.endswith("/debian-security"):
            found.setdefault("DIB_DEBIAN_SECURITY_MIRROR", url)
        elif url.endswith("/debian"):
            found.setdefault("DIB_DISTRIBUTION_MIRROR", url)
    return found


def read_apt_sources() -> str:
    files = [pathlib.Path("/etc/apt/sources.list"), *sorted(pathlib.Path("/etc/apt/sources.list.d").glob("*"))]
    return "\n".join(f.read_text(errors="replace") for f in files if f.is_file())


def loop_devices(work: pathlib.Path) -> list[str]:
    """Those of files in the working directory, and what removes them."""
    found = []
    for path in pathlib.Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # it goes at this moment
            if str(work) in path.read_text():
                found.append(f"loop device: losetup -d /dev/{path.parent.parent.name}")
    return found


class ImageDemo:
    """Builder, image and upload in a working directory of the demonstration."""

    def __init__(self, work: pathlib.Path, config: pathlib.Path) -> None:
        self.work = work
        self.images = work / "images"
        self.config = config
        self.summary: dict[str, Any] = {}
        self.process: subprocess.Popen[bytes] | None = None

    def _program(self, name: str) -> str:
        return str(pathlib.Path(sys.executable).with_name(name))

    def settings(self) -> dict[str, Any]:
        """What the image adds to the configuration."""
        self.images.mkdir()
        return {
            "images-dir": str(self.images),
            "build-log-dir": str(self.work / "build-logs"),
            "diskimages": [
                {
                    "name": IMAGE,
                    "elements": ["debian-minimal", "openssh-server"],
                    "release": RELEASE,
                    "username": "root",
                    "env-vars": {
                        "DIB_DEBIAN_USE_DEBOOTSTRAP_CACHE": "0",
                        "DIB_IMAGE_CACHE": str(self.work / "dib-cache"),
                        **apt_mirrors(read_apt_sources()),
                    },
                }
            ],
        }

    def run(self) -> None:
        """Build, upload, list.

        :raises SystemExit: the image could not be built or uploaded.
        """
        environment = dict(os.environ)
        nodepool = [self._program("nodepool"), "-c", str(self.config)]
        say(f"\nBuilding a Debian {RELEASE} image with diskimage-builder (a few minutes; --no-image skips it)")
        # Asked for before the builder is there, so that its first build is the one that is followed.
        waiting = subprocess.Popen(
            [*nodepool, "image-build", IMAGE, "--wait", "--timeout", str(int(BUILD_TIMEOUT))],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # Ctrl-C is for us: the build ends with all the rest
        try:
            with open(self.work / "builder.log", "wb") as log:
                self.process = subprocess.Popen(
                    [self._program("nodepool-builder"), "-f", "-c", str(self.config), "-p", str(self.work / "builder.pid")],
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,
                )
            if waiting.wait(BUILD_TIMEOUT + 60):
                raise SystemExit(f"the image was not built; see {self.work}/build-logs and {self.work}/builder.log")
        finally:
            if waiting.poll() is None:
                waiting.kill()
                waiting.wait(5)
        with step("Uploading the image to the node manager", sys.stdout):
            upload = self._wait_upload(nodepool, environment)
        say("\nnodepool dib-image-list")
        subprocess.run([*nodepool, "dib-image-list"], env=environment, check=True, timeout=60)
        say("nodepool image-list")
        subprocess.run([*nodepool, "image-list"], env=environment, check=True, timeout=60)
        build = self._json([*nodepool, "dib-image-list", "--detail"], environment)[0]
        (file,) = self.images.glob("*.tar")
        self.summary = {
            "name": IMAGE,
            "formats": build["formats"],
            "state": build["state"],
            "seconds": build.get("elapsed"),
            "bytes": file.stat().st_size,
            "uploads": [upload["provider"]],
        }

    def _json(self, command: list[str], environment: dict[str, str]) -> Any:
        out = subprocess.run([*command, "--format", "json"], env=environment, check=True, timeout=60, capture_output=True)
        return json.loads(out.stdout)

    def _wait_upload(self, nodepool: list[str], environment: dict[str, str]) -> Any:
        deadline = time.monotonic() + UPLOAD_TIMEOUT
        while time.monotonic() < deadline:
            uploads = [u for u in self._json([*nodepool, "image-list"], environment) if u["state"] == "ready"]
            if uploads:
                return uploads[0]
            time.sleep(0.2)
        raise SystemExit(f"the image was not uploaded within {UPLOAD_TIMEOUT:.0f} s; see {self.work}/builder.log")

    def stop(self) -> list[str]:
        """End the builder; what it left behind."""
        if self.process is None:
            return []
        self.process.terminate()
        try:
            self.process.wait(25)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)
            return ["nodepool-builder had to be killed; nothing to do"]
        return []
