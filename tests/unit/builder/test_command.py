"""The image-building command and its environment."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

import nodepool
from nodepool.builder.building.command import (
    CONVERTED,
    build_command,
    build_environment,
    temporary_base,
)
from nodepool.config.diskimages import DiskImage

PACKAGE = os.path.dirname(nodepool.__file__)


def image(**options: Any) -> DiskImage:
    value = DiskImage("debian")
    value.setFromConfig({"formats": ["raw"], **options})
    return value


@pytest.mark.spec(
    "BLD-7.2: <dib-cmd words> -x -t <formats> --checksum --no-tmpfs [...] -o <output> <elements>"
)
def test_default_command_has_sorted_formats_and_all_elements() -> None:
    assert build_command(
        image(formats=["vhd", "qcow2", "raw"], elements=["b", "a"]), "/images", "debian-0123"
    ) == [
        "disk-image-create",
        "-x",
        "-t",
        "qcow2,raw,vhd",
        "--checksum",
        "--no-tmpfs",
        "--qemu-img-options",
        "compat=0.10",
        "-o",
        "/images/debian-0123",
        "b",
        "a",
    ]


@pytest.mark.spec(
    "BLD-7.2: --qemu-img-options exactly when the formats contain qcow2; no elements: nothing after"
)
def test_command_without_qcow2_and_elements() -> None:
    assert build_command(image(), "/images/", "debian-0123") == [
        "disk-image-create",
        "-x",
        "-t",
        "raw",
        "--checksum",
        "--no-tmpfs",
        "-o",
        "/images/debian-0123",
    ]


@pytest.mark.parametrize("other", sorted(CONVERTED))
def test_options_of_qcow2_are_not_given_to_other_formats(
    tmp_path: pathlib.Path, other: str
) -> None:
    assert "--qemu-img-options" not in build_command(
        image(formats=["qcow2", other]), "/images", "debian-1"
    )
    raw = tmp_path / "raw"
    raw.write_bytes(bytes(1 << 20))
    convert = ["qemu-img", "convert", "-f", "raw", "-O", other]
    refused = subprocess.run(
        [*convert, "-o", "compat=0.10", raw, tmp_path / "new"], capture_output=True, check=False
    )
    assert refused.returncode and b"compat" in refused.stderr
    subprocess.run([*convert, raw, tmp_path / "new"], check=True)


@pytest.mark.spec(
    "BLD-7.2: dib-cmd is split like a shell would; %p is replaced by the installed package's "
    "directory"
)
def test_dib_cmd_is_split_like_a_shell_does() -> None:
    text = """%p/../tests/fake-dib --name "two words" 'a;b' $HOME"""
    command = build_command(image(**{"dib-cmd": text}), "/my images", "debian-1")
    assert command[:5] == [f"{PACKAGE}/../tests/fake-dib", "--name", "two words", "a;b", "$HOME"]
    assert command[-1] == "/my images/debian-1"


@pytest.mark.parametrize(
    ("text", "message"), [("dib 'x", "check its quotes"), ("  ", "dib-cmd is empty")]
)
def test_invalid_dib_cmd_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"diskimage debian: .*{message}"):
        build_command(image(**{"dib-cmd": text}), "/images", "debian-1")


@pytest.mark.spec(
    "BLD-7.3: the daemon's environment, then DIB_* and ELEMENTS_PATH, then env-vars override "
    "anything"
)
def test_env_vars_override_the_environment() -> None:
    base = {"PATH": "/usr/bin", "HOME": "/root", "DIB_RELEASE": "from outside", "KEPT": "1"}
    environment = build_environment(
        image(release=21), "/images/debian-1", "/elements", base, "/tmp/private"
    )
    assert environment == {
        "PATH": f"/usr/bin:{os.path.dirname(sys.executable)}",
        "HOME": "/root",
        "KEPT": "1",
        "DIB_RELEASE": "21",
        "DIB_IMAGE_NAME": "debian",
        "DIB_IMAGE_FILENAME": "/images/debian-1",
        "ELEMENTS_PATH": "/elements",
        "TMPDIR": "/tmp/private",
    }
    own = {
        "PATH": "/opt",
        "DIB_RELEASE": "x",
        "DIB_IMAGE_NAME": "y",
        "ELEMENTS_PATH": "z",
        "TMPDIR": "/big",
        "KEPT": "2",
    }
    changed = build_environment(
        image(**{"env-vars": own}), "/images/debian-1", "/elements", base, None
    )
    assert own.items() <= changed.items()
    assert base["KEPT"] == "1"


@pytest.mark.spec("BLD-7.3: ELEMENTS_PATH only if set; DIB_RELEASE may be empty")
def test_environment_without_elements() -> None:
    environment = build_environment(image(), "/images/debian-1", None, {}, None)
    assert environment["DIB_RELEASE"] == ""
    assert "ELEMENTS_PATH" not in environment
    assert "TMPDIR" not in environment


def test_programs_in_the_directory_of_python_are_found_once_and_last() -> None:
    programs = os.path.dirname(sys.executable)
    for path in (f"/usr/bin:{programs}", f"{programs}:/usr/bin"):
        assert build_environment(image(), "/i", None, {"PATH": path}, None)["PATH"] == path
    environment = build_environment(image(), "/i", None, {"PATH": "/nowhere"}, None)
    done = subprocess.run(
        [os.path.basename(sys.executable), "--version"],
        env=environment,
        capture_output=True,
        check=True,
    )
    assert done.stdout.startswith(b"Python 3")


def test_tmpdir_of_the_image_has_precedence() -> None:
    assert temporary_base(image(), {}) == "/tmp"
    assert temporary_base(image(), {"TMPDIR": "/var/tmp"}) == "/var/tmp"
    assert (
        temporary_base(image(**{"env-vars": {"TMPDIR": "/big"}}), {"TMPDIR": "/var/tmp"}) == "/big"
    )
