"""Static hosts, which can be switched off."""

from __future__ import annotations

from nodepool import exceptions
from nodepool.lab.simulation.kernel import current

#: The port that the static driver connects to; it collects host keys only of connections by SSH.
PORT, CONNECTION = 5986, "winrm"
#: Whether a host answers, by name.
hosts: dict[str, bool] = {}


def scan(ip: str, port: int = PORT, timeout: float = 60, gather_hostkeys: bool = True) -> list[str]:
    """Stand for :func:`nodepool.nodeutils.nodescan`, which waits for a port.

    :raises ConnectionTimeoutException: the host is switched off.
    """
    kernel = current()
    kernel.sleep(kernel.random.uniform(0.001, 0.2))
    if not hosts[ip]:
        kernel.sleep(timeout)
        raise exceptions.ConnectionTimeoutException(f"Timeout scanning {ip} port {port}")
    return []
