"""The host gets other name servers, by DHCP or a VPN, while its slivers run."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import wait_for
from tests.integration.nodemanager.network.test_net import pytestmark
from tests.support.nodemanager import scene
from tests.support.nodemanager.scene import NmDaemon, make_daemon

__all__ = ["pytestmark"]

#: The daemon, with another file of the host's name servers and without the minute between tasks.
PROGRAM = """#!{python}
import pathlib, sys
from nodepool.nodemanager import regular_tasks
from nodepool.nodemanager.network import firewall
from nodepool.nodemanager.service import main
regular_tasks.EXPIRY_CHECK = 0.1
firewall._RESOLVERS = (pathlib.Path({resolvers!r}),)
sys.exit(main())
"""


@pytest.fixture
def resolvers(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "resolv.conf"
    path.write_text("nameserver 192.0.2.1\n")
    return path


@pytest.fixture
def daemon(
    tmp_path: pathlib.Path, resolvers: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[NmDaemon]:
    program = tmp_path / "nodepool-nodemanager"
    program.write_text(PROGRAM.format(python=sys.executable, resolvers=str(resolvers)))
    program.chmod(0o755)
    monkeypatch.setattr(scene, "PROGRAM", str(program))
    yield from make_daemon(tmp_path, network={"default": "nat", "subnet": "10.227.0.0/16"})


def names(daemon: NmDaemon, sliver: str) -> str:
    return daemon.ssh(sliver, "cat /etc/resolv.conf")


def stored(daemon: NmDaemon, sliver: str) -> str:
    """Return the content that the daemon last had for the sliver."""
    dump = json.loads(daemon.client.call("DumpDatabase"))
    return str(dump["local"][f"sliver_{sliver}"]["handle"]["resolv_conf"])


def test_running_slivers_get_the_new_name_servers_of_the_host(
    daemon: NmDaemon, resolvers: pathlib.Path
) -> None:
    daemon.put("alpha")
    assert names(daemon, "alpha") == "nameserver 192.0.2.1\n"
    resolvers.write_text("nameserver 192.0.2.2\nsearch example.org\n")
    expected = "nameserver 192.0.2.2\nsearch example.org\n"
    wait_for(lambda: names(daemon, "alpha") == expected, 20, "the new name servers")


def test_name_servers_that_change_while_no_daemon_runs_reach_running_slivers(
    daemon: NmDaemon, resolvers: pathlib.Path
) -> None:
    daemon.put("alpha")
    daemon.stop()
    resolvers.write_text("nameserver 192.0.2.2\n")
    daemon.start()
    wait_for(lambda: "192.0.2.2" in names(daemon, "alpha"), 20, "the new name servers")


def test_slivers_that_start_before_the_host_has_name_servers_get_them_later(
    daemon: NmDaemon, resolvers: pathlib.Path
) -> None:
    """As after a boot whose DHCP takes longer than the start of the node manager."""
    resolvers.write_text("")
    daemon.put("alpha")
    assert "192.0.2" not in names(daemon, "alpha")
    resolvers.write_text("nameserver 192.0.2.1\n")
    wait_for(lambda: names(daemon, "alpha") == "nameserver 192.0.2.1\n", 20, "the name servers")


def test_new_name_servers_change_nothing_that_a_job_has_changed(
    daemon: NmDaemon, resolvers: pathlib.Path
) -> None:
    daemon.put("alpha")
    daemon.put("beta")
    daemon.ssh("alpha", "echo nameserver 127.0.0.1 > /etc/resolv.conf")
    daemon.ssh("beta", "echo '# of the job' >> /root/.ssh/authorized_keys")
    resolvers.write_text("nameserver 192.0.2.2\n")
    wait_for(lambda: "192.0.2.2" in names(daemon, "beta"), 20, "the new name servers")
    assert "# of the job" in daemon.ssh("beta", "cat /root/.ssh/authorized_keys")
    wait_for(lambda: "192.0.2.2" in stored(daemon, "alpha"), 20, "alpha to be checked")
    assert names(daemon, "alpha") == "nameserver 127.0.0.1\n"


@pytest.mark.parametrize("given", ["nameserver 127.0.0.1\nnameserver fd00::53\n", ""])
def test_host_without_a_name_server_for_slivers_is_reported_with_the_remedy(
    daemon: NmDaemon, resolvers: pathlib.Path, given: str
) -> None:
    assert "name server" not in daemon.log
    daemon.stop()
    resolvers.write_text(given)
    daemon.start()
    assert "network nat: slivers resolve no names: this host has no name server" in daemon.log
    assert "network.dns" in daemon.log
