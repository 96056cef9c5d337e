"""Backend `nspawn` as far as it can be tested without systemd: what it finds missing, and its
command lines (C.2, C.3).
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterator

import pytest

from nodepool.nodemanager.backends import load, names
from nodepool.nodemanager.backends.base import BackendError, Services, SliverSpec
from nodepool.nodemanager.backends.nspawn import NspawnBackend, limits_argv, properties, run_argv
from nodepool.nodemanager.helper.zygote import Zygote


@pytest.fixture
def backend(tmp_path: pathlib.Path) -> Iterator[NspawnBackend]:
    zygote = Zygote()
    yield NspawnBackend(tmp_path, Services(zygote))
    zygote.stop()


@pytest.mark.spec("NM-C.2: nspawn needs systemd as process 1; a host without is told so")
@pytest.mark.skipif(os.path.isdir("/run/systemd/system"), reason="this host has systemd")
def test_check_without_systemd(backend: NspawnBackend) -> None:
    fatal = {problem.feature: problem.remedy for problem in backend.check() if problem.fatal}
    if os.geteuid() == 0:
        assert "is not systemd" in fatal["systemd"]
    assert fatal


@pytest.mark.spec("NM-C.3: nspawn: the RSpec as properties of a unit")
@pytest.mark.parametrize(
    "rspec, wanted",
    [
        (
            {},
            [
                "CPUWeight=32",
                "TasksMax=1024",
                "CPUQuota=",
                "MemoryMax=infinity",
                "MemorySwapMax=infinity",
                "MemoryMin=0M",
            ],
        ),
        (
            {
                "nm_cpu_guaranteed_share": 200,
                "nm_cpu_share": 5,
                "nm_pids_max": 50,
                "nm_cpu_limit": 500,
                "nm_mem_limit": 256,
                "nm_mem_guaranteed": 64,
            },
            [
                "CPUWeight=200",
                "TasksMax=50",
                "CPUQuota=200%",
                "MemoryMax=256M",
                "MemorySwapMax=0",
                "MemoryMin=64M",
            ],
        ),
    ],
)
def test_limits_become_unit_properties(rspec: dict[str, int], wanted: list[str]) -> None:
    assert properties(rspec, cores=4) == wanted
    assert limits_argv("m", rspec, 4) == [
        "systemctl",
        "set-property",
        "--runtime",
        "m.service",
        *wanted,
    ]


@pytest.mark.spec(
    "NM-C.2: nspawn: own ids, own network, full systemd; the unit outlives the daemon"
)
def test_nspawn_command_line_isolates_the_container(tmp_path: pathlib.Path) -> None:
    spec = SliverSpec("s1", 1, "tar:/x", {}, hostname="h", api_socket=str(tmp_path))
    argv = run_argv("m", spec, "/tree", 5000, 65536, 2)
    outside, inside = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    assert outside[0] == "systemd-run" and {
        "--unit=m",
        "--property=Delegate=yes",
        "--collect",
    } <= set(outside)
    assert inside[0] == "systemd-nspawn" and {
        "--private-users=5000:65536",
        "--private-network",
        "--boot",
        "--keep-unit",
        "--directory=/tree",
        f"--bind-ro={tmp_path}:/run/nodepool",
    } <= set(inside)
    # Words after the options are for systemd inside.
    assert inside[-3:] == [
        "systemd.hostname=h",
        "systemd.mask=systemd-networkd-wait-online.service",
        "systemd.mask=NetworkManager-wait-online.service",
    ]
    assert "--setenv=SYSTEMD_NSPAWN_LOCK=0" in outside


def test_names_of_machines(backend: NspawnBackend) -> None:
    found = {
        backend.processes.machine(name) for name in ("a_b", "a-b", "x" * 63, "x" * 62 + "y", "a_")
    }
    assert len(found) == 5
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?", name) for name in found)


def test_image_host_is_refused(backend: NspawnBackend) -> None:
    with pytest.raises(BackendError, match="nspawn has none of this"):
        backend._tree(SliverSpec("s1", 1, "host", {}))


def test_backends_are_found_by_their_names() -> None:
    assert load("nspawn") is NspawnBackend
    assert {"native", "nspawn", "podman", "rootless"} <= set(names())
