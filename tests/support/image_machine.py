"""A virtual machine that starts an image as a cloud does: with a drive that has its host name,
network and keys.

It runs in software emulation, since hardware that virtualizes is missing on many machines, or does
not work: a minute or two until somebody can log in. The image has no boot loader (it is built
without device-mapper), so QEMU starts the image's kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.support.ports import reserve

QEMU = "qemu-system-x86_64"
MAC = "52:54:00:12:34:56"
#: Addresses of QEMU's network: what its DHCP server gives, and one that only a drive can name.
BY_DHCP, STATIC, GATEWAY, NAME_SERVER = "10.0.2.15", "10.0.2.77", "10.0.2.2", "10.0.2.3"


def obstacle() -> str | None:
    """Why no machine can be started here; None: it can."""
    if os.uname().machine != "x86_64":
        return f"the images are for x86_64, and this machine is {os.uname().machine}"
    return None if shutil.which(QEMU) else f"missing package: qemu-system-x86 ({QEMU})"


def read_kernel(tar: pathlib.Path, target: pathlib.Path) -> None:
    """Copy ``vmlinuz`` and ``initrd.img`` of an image into a folder."""
    with tarfile.open(tar) as archive:
        for member in archive:
            folder, _, name = member.name.removeprefix("./").rpartition("/")
            kind = name.partition("-")[0]
            if folder == "boot" and member.isfile() and kind in ("vmlinuz", "initrd.img"):
                content = archive.extractfile(member)
                assert content is not None
                with content, open(target / kind, "wb") as copy:
                    shutil.copyfileobj(content, copy)


def write_config_drive(folder: pathlib.Path, name: str, key: str) -> str:
    """Write what a machine gets from OpenStack, with a fixed address; return the label of the
    drive.
    """
    meta: dict[str, Any] = {
        "uuid": "83679162-1378-4288-a2d4-70e13ec132aa",
        "name": name,
        "hostname": name,
        "public_keys": {"jobs": f"{key}\n"},
        "keys": [{"name": "jobs", "type": "ssh", "data": f"{key}\n"}],
    }
    route = {"network": "0.0.0.0", "netmask": "0.0.0.0", "gateway": GATEWAY}
    network: dict[str, Any] = {
        "links": [{"id": "tap0", "type": "ovs", "ethernet_mac_address": MAC, "mtu": None}],
        "networks": [
            {
                "id": "network0",
                "network_id": "5f1f0d4f-3a1a-4a3c-8f0b-5a0b6a2e2f11",
                "type": "ipv4",
                "link": "tap0",
                "ip_address": STATIC,
                "netmask": "255.255.255.0",
                "routes": [route],
            }
        ],
        "services": [{"type": "dns", "address": NAME_SERVER}],
    }
    place = folder / "openstack" / "latest"
    place.mkdir(parents=True)
    (place / "meta_data.json").write_text(json.dumps(meta))
    (place / "network_data.json").write_text(json.dumps(network))
    return "config-2"


def write_nocloud_drive(folder: pathlib.Path, name: str, key: str) -> str:
    """Write the files of NoCloud, without a network; return the label of the drive."""
    (folder / "meta-data").write_text(
        f"instance-id: {name}\nlocal-hostname: {name}\npublic-keys: [{json.dumps(key)}]\n"
    )
    (folder / "user-data").write_text("#cloud-config\n{}\n")
    return "cidata"


@dataclass(frozen=True)
class Machine:
    """A running machine, whose port 22 is a port of 127.0.0.1."""

    port: int
    console: pathlib.Path

    def shown(self) -> str:
        """Return the end of what it has written on its console."""
        return self.console.read_text(errors="replace")[-4000:] if self.console.exists() else ""


@contextlib.contextmanager
def booted(
    disk: pathlib.Path, kernel: pathlib.Path, drive: pathlib.Path, label: str, address: str
) -> Iterator[Machine]:
    """Start a machine; the disk stays as it is.

    :param disk: the format is the end of its name.
    :param kernel: folder that `read_kernel` has filled.
    :param drive: folder with the content of the drive.
    :param address: that the machine will have.
    """
    machine = Machine(reserve(1), drive.with_name(f"{drive.name}.console"))
    command = [
        *(QEMU, "-accel", "tcg", "-cpu", "max", "-smp", "1", "-m", "1G"),
        *("-display", "none", "-no-reboot", "-serial", f"file:{machine.console}"),
        *("-kernel", str(kernel / "vmlinuz"), "-initrd", str(kernel / "initrd.img")),
        *("-append", "root=/dev/vda rw console=ttyS0 panic=-1 mitigations=off"),
        *("-drive", f"file={disk},format={disk.suffix[1:]},if=none,id=root,snapshot=on"),
        *("-device", "virtio-blk-pci,drive=root"),
        *("-blockdev", f"driver=vvfat,dir={drive},label={label},read-only=on,node-name=config"),
        *("-device", "virtio-blk-pci,drive=config"),
        "-nic",
        f"user,model=virtio-net-pci,mac={MAC},hostfwd=tcp:127.0.0.1:{machine.port}-{address}:22",
    ]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        try:
            yield machine
        finally:
            process.kill()
