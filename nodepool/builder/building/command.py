"""The image-building command and its environment (BLD-7.2, BLD-7.3)."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping

import nodepool
from nodepool.config.diskimages import DiskImage

#: Formats for which diskimage-builder runs qemu-img, besides qcow2.
CONVERTED = frozenset({"vdi", "vhdx", "vmdk", "vpc"})


def build_command(diskimage: DiskImage, images_dir: str, base: str) -> list[str]:
    """Return the argument list for one build; *base* is ``<image>-<build id>``.

    :raises ValueError: ``dib-cmd`` is empty or has unbalanced quotes.
    """
    package = os.path.dirname(os.path.abspath(nodepool.__file__))
    try:
        command = [word.replace("%p", package) for word in shlex.split(diskimage.dib_cmd)]
    except ValueError as error:
        raise ValueError(
            f"diskimage {diskimage.name}: dib-cmd {diskimage.dib_cmd!r} cannot be split into "
            f"words: {error}; check its quotes"
        ) from None
    if not command:
        raise ValueError(
            f"diskimage {diskimage.name}: dib-cmd is empty; remove it to use disk-image-create"
        )
    formats = ",".join(sorted(diskimage.image_types))
    arguments = [*command, "-x", "-t", formats, "--checksum", "--no-tmpfs"]
    # diskimage-builder passes them to qemu-img for each format that it converts; only qcow2 has
    # this one.
    if "qcow2" in formats and diskimage.image_types.isdisjoint(CONVERTED):
        arguments += ["--qemu-img-options", "compat=0.10"]
    return [*arguments, "-o", os.path.join(images_dir, base), *diskimage.elements.split()]


def build_environment(
    diskimage: DiskImage,
    output: str,
    elements_dir: str | None,
    base_environment: Mapping[str, str],
    private_tmp: str | None,
) -> dict[str, str]:
    """Return the whole environment of the command; ``env-vars`` of the image take precedence."""
    environment = dict(base_environment)
    # Finds a diskimage-builder that is installed alongside this program, without an activated
    # virtual environment.
    programs = os.path.dirname(sys.executable)
    path = environment.get("PATH") or os.defpath
    if programs and programs not in path.split(os.pathsep):
        path = f"{path}{os.pathsep}{programs}"
    environment["PATH"] = path
    if private_tmp:
        environment["TMPDIR"] = private_tmp
    environment |= {
        "DIB_RELEASE": diskimage.release,
        "DIB_IMAGE_NAME": diskimage.name,
        "DIB_IMAGE_FILENAME": output,
    }
    if elements_dir:
        environment["ELEMENTS_PATH"] = elements_dir
    environment.update(diskimage.env_vars)
    return environment


def temporary_base(diskimage: DiskImage, environ: Mapping[str, str]) -> str:
    """Return the directory in which diskimage-builder creates its temporary trees.

    Its ``mktemp -t`` prefers TMPDIR.
    """
    return diskimage.env_vars.get("TMPDIR") or environ.get("TMPDIR") or "/tmp"
