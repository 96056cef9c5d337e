"""The directory of an installation: its configuration files, written once."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import yaml

from nodepool.base import unix_socket
from nodepool.base.files import lock_file, replace_file
from nodepool.exceptions import ConfigurationError
from nodepool.lab.dev import certificates
from nodepool.nodemanager.rootfs.ssh_files import new_host_key
from nodepool.zk.records import Node

#: Slivers and ports for them.
PLACES = 10
#: Below those that the kernel gives to outgoing connections.
PORTS = range(20_000, 32_000)
#: MiB that one process (without root) or one sliver (with root) may use.
MEMORY = 512
LABEL = "small"
#: What distinguishes such a directory from others, which must not be removed.
LOCK = "nodepool-dev.lock"


class Directory:
    """All files of an installation.

    :param kept: keep the directory when this and later installations end.
    :raises ConfigurationError: another installation uses it, or it contains something else.
    """

    def __init__(self, path: Path, kept: bool) -> None:
        self.path = path
        self.config = path / "nodepool.yaml"
        self.manager_config = path / "nodemanager.yaml"
        self.clouds = path / "clouds.yaml"
        self.key = path / "key"
        self.ssh_config = path / "ssh_config"
        self.known_hosts = path / "known_hosts"
        self.api = f"unix:{path}/run/nodemanager.api"
        #: Whether an earlier installation has left it.
        self.existed = (path / LOCK).exists()
        if path.exists() and not self.existed and any(path.iterdir()):
            raise ConfigurationError(
                f"{path} is not empty, and not a directory of nodepool dev; choose another one"
            )
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            lock_file(self._lock)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigurationError(
                f"another nodepool dev uses {path}; end it, or specify another --directory"
            ) from None
        if kept:
            (path / "kept").touch()
        self.kept = (path / "kept").exists()

    def write(self) -> None:
        """Create missing files. ``nodepool.yaml`` comes last: if it exists, all others do."""
        # Existing nodes are added again.
        self.ssh_config.unlink(missing_ok=True)
        self.known_hosts.unlink(missing_ok=True)
        if self.config.exists():
            return
        certificates.create(self.path)
        private, public = new_host_key()
        replace_file(str(self.key), private)
        # For slivers; then for ZooKeeper and pages.
        first = _free_ports(PLACES + 2)
        root = os.geteuid() == 0
        manager = {
            "state-dir": str(self.path / "slivers"),
            "run-dir": str(self.path / "run"),
            "max-slivers": PLACES,
            "ssh": {"ports": f"{first}-{first + PLACES - 1}"},
            "api": {"tcp": False},
        }
        self.manager_config.write_text(yaml.safe_dump(manager, sort_keys=False))
        self.clouds.write_text("clouds:\n  fake: {}\n")
        limits: dict[str, Any] = {"ram": MEMORY, "pids": 500}
        if root:
            limits |= {"cpus": 0.1, "disk": 2}
        slivers = {
            "name": "here",
            "driver": "nodemanager",
            "ssh-keys": public,
            "hosts": [{"name": "this-machine", "url": self.api}],
            # Slivers of an ordinary user have no root.
            "cloud-images": [{"name": "host", **({} if root else {"username": "zuul"})}],
            "pools": [
                {
                    "name": "main",
                    "max-servers": PLACES,
                    "labels": [{"name": LABEL, "cloud-image": "host", **limits}],
                }
            ],
        }
        self._write_config(first + PLACES, first + PLACES + 1, slivers)

    def use_fake(self) -> Path | None:
        """Configure the ``fake`` driver.

        Return the copy of a configuration that the user may have changed.
        """
        config, old = self.settings(), None
        if self.existed and [provider["driver"] for provider in config["providers"]] != ["fake"]:
            old = self.config.with_suffix(".yaml.old")
            replace_file(str(old), self.config.read_bytes())
        label = {"name": LABEL, "cloud-image": "fake", "min-ram": 1}
        provider = {
            "name": "fake",
            "driver": "fake",
            "cloud": "fake",
            "cloud-images": [{"name": "fake", "image-name": "Fake Precise"}],
            "pools": [{"name": "main", "max-servers": PLACES, "labels": [label]}],
        }
        self._write_config(
            config["zookeeper-servers"][0]["port"], config["webapp"]["port"], provider
        )
        return old

    def _write_config(self, zookeeper: int, pages: int, provider: dict[str, Any]) -> None:
        config: dict[str, Any] = {
            "zookeeper-servers": [{"host": "127.0.0.1", "port": zookeeper}],
            "zookeeper-tls": {
                name: str(self.path / f"{name}.pem") for name in ("ca", "cert", "key")
            },
            "webapp": {"port": pages, "listen_address": "127.0.0.1"},
            "labels": [{"name": LABEL, "min-ready": 1}],
            "providers": [provider],
        }
        api = str(self.path / "api.sock")
        if len(os.fsencode(api)) <= unix_socket.LONGEST:
            config["access"] = {"socket": api}
        text = "# Written once by nodepool dev; changes are loaded immediately.\n" + yaml.safe_dump(
            config, sort_keys=False
        )
        replace_file(str(self.config), text)

    def settings(self) -> dict[str, Any]:
        """Return the settings in ``nodepool.yaml``.

        :raises ConfigurationError: it cannot be read, or lacks what nodepool dev needs.
        """
        try:
            config = yaml.safe_load(self.config.read_text())
            int(config["zookeeper-servers"][0]["port"]), int(config["webapp"]["port"])
            [provider["driver"] for provider in config["providers"]]
        except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError) as error:
            remedy = f"repair it, or remove {self.path} and start again"
            raise ConfigurationError(
                f"{self.config}: needs zookeeper-servers, webapp: port and providers; {remedy}"
            ) from error
        return dict(config)

    def add_node(self, node: Node) -> None:
        """Configure ``ssh -F ssh_config NODE_ID`` for a node."""
        with open(self.known_hosts, "a") as file:
            file.writelines(f"{node.id} {key}\n" for key in node.host_keys)
        options = {
            "HostName": node.interface_ip,
            "Port": node.connection_port,
            "User": node.username,
            "IdentityFile": self.key,
            "IdentitiesOnly": "yes",
            "HostKeyAlias": node.id,
            "UserKnownHostsFile": self.known_hosts,
        }
        with open(self.ssh_config, "a") as file:
            file.write(
                f"Host {node.id}\n"
                + "".join(f"  {name} {value}\n" for name, value in options.items())
            )

    def close(self) -> None:
        """Let another installation use it; remove it unless it is kept."""
        if not self.kept:
            # The lock file is last: without it the next start would not recognize the rest.
            for entry in self.path.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)
                elif entry.name != LOCK:
                    entry.unlink()
            if [entry.name for entry in self.path.iterdir()] == [LOCK]:
                (self.path / LOCK).unlink()
                self.path.rmdir()
        os.close(self._lock)


def _free_ports(count: int) -> int:
    """Return the first of this many adjacent free ports on loopback.

    :raises ConfigurationError: there are none.
    """
    offset = os.getpid() * count % len(PORTS)
    for step in range(0, len(PORTS), count):
        first = PORTS[(offset + step) % (len(PORTS) - count)]
        if all(map(_is_free, range(first, first + count))):
            return first
    raise ConfigurationError(
        f"no {count} adjacent ports from {PORTS[0]} to {PORTS[-1]} are free on this machine"
    )


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False
