"""All attempts, by the root of a sliver of backend native, with no privileges and with all."""

from __future__ import annotations

import pytest

from tests.attacks.conftest import ATTACKER, VICTIM, attack, attempts_of, judge
from tests.support.nodemanager.scene import NmDaemon

PRIVILEGED = "trusted"
MODULES = ["kernel", "mounts", "network", "processes", "api"]


@pytest.fixture(scope="module")
def privileged(host: NmDaemon) -> str:
    host.put(
        PRIVILEGED,
        rspec={"nm_mem_limit": 256, "nm_pids_max": 300},
        privileges=["debug", "docker", "ping"],
    )
    return PRIVILEGED


@pytest.mark.spec("issue 10, 2: attempts of a sliver's root, each with what may come of it")
@pytest.mark.parametrize("module", MODULES)
def test_root_in_a_sliver_achieves_only_what_is_allowed(host: NmDaemon, module: str) -> None:
    found = attack(host, ATTACKER, module)
    assert set(found) == set(attempts_of(module))
    assert judge(module, found) == []
    assert host.ssh(VICTIM, "echo well") == "well\n"


@pytest.mark.spec("issue 10, 2 and 3: the same with all privileges that a label may ask for")
@pytest.mark.parametrize("module", MODULES)
def test_attempts_with_privileges(host: NmDaemon, privileged: str, module: str) -> None:
    found = attack(host, privileged, module)
    assert set(found) == set(attempts_of(module))
    assert judge(module, found, privileged=True) == []
    assert host.ssh(VICTIM, "echo well") == "well\n"


@pytest.mark.spec("issue 10, 2: an ordinary user inside can do no more than its root")
@pytest.mark.parametrize("module", ["kernel", "mounts"])
def test_attempts_of_a_user(host: NmDaemon, module: str) -> None:
    host.ssh(
        ATTACKER,
        "useradd -m bob; usermod -p '*' bob; mkdir -p /home/bob/.ssh; cp "
        "/root/.ssh/authorized_keys /home/bob/.ssh/; "
        "chown -R bob /home/bob; chmod 700 /home/bob/.ssh",
    )
    found = attack(host, ATTACKER, module, user="bob")
    escapes = [line for line in found.values() if "escape" in line]
    assert escapes == []
    assert set(found) == set(attempts_of(module))


def test_programs_that_install_filters_where_they_can_work_without(host: NmDaemon) -> None:
    """man of man-db; sshd is tested as the server of slivers with ``ssh: {mode: sshd}``."""
    page = ".TH X 1\\n.SH NAME\\nx - shown\\n"
    assert "shown" in host.ssh(
        ATTACKER, f"printf '{page}' > /root/x.1; MANPAGER=cat man -l /root/x.1", timeout=60
    )
