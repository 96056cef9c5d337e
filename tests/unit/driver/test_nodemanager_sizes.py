"""What the nodemanager driver asks hosts for."""

from __future__ import annotations

import pytest

from nodepool.driver.nodemanager.config import NodeManagerLabel
from nodepool.driver.nodemanager.sizes import rspec_of


@pytest.mark.parametrize("cpus", [0.5, 1, 1.5, 7])
def test_slivers_for_all_cores_of_a_host_fit_its_guaranteed_share(cpus: float) -> None:
    label = NodeManagerLabel()
    label.cpus = cpus
    for cores in range(8, 257):
        share = rspec_of(label, cores)["nm_cpu_guaranteed_share"]
        assert int(cores / cpus) * share <= 1000, f"{cores} cores"
