"""SSH certificates for leases: they open only the nodes of one lease, and end with it."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable

from nodepool.lease.record import Lease, LeaseError, Reason

#: Seconds for ssh-keygen, and by which the clock of a node may be late.
TIMEOUT, SKEW = 10.0, 300
#: Public keys as ssh-keygen writes them.
PUBLIC_KEY = re.compile(
    r"(?:ssh|ecdsa|sk-ssh|sk-ecdsa)-[a-z0-9@.-]+ AAAA[A-Za-z0-9+/]+=*(?: [^\x00-\x1f\x7f]*)?",
    re.ASCII,
)


def principal(node_id: str) -> str:
    """Return the name by which a node recognizes its certificates: its host name."""
    return f"np{node_id}"


def sign(
    ca_key: str,
    public_key: str,
    lease: Lease,
    now: Callable[[], float] = time.time,
    cluster: str | None = None,
) -> str:
    """Return a certificate for a public key, valid on the nodes of a held lease until its end.

    :param cluster: id of the cluster, which stands in the key id: several clusters may share a CA.
    :param ca_key: file with the private key of the CA, which has no passphrase.
    :raises LeaseError: the key is not valid, or the lease has ended.
    :raises OSError: the certificate cannot be created.
    """
    if not PUBLIC_KEY.fullmatch(public_key.strip()):
        raise LeaseError(
            Reason.BAD_REQUEST, "public_key must be one line such as `ssh-ed25519 AAAA...`"
        )
    left = 0 if lease.ends is None else int(lease.ends - now())
    if left <= 0:
        raise LeaseError(
            Reason.ENDED,
            f"Lease {lease.id} has no end, or has ended; there are no certificates for it",
        )
    with tempfile.TemporaryDirectory(prefix="nodepool-certificate-") as folder:
        path = os.path.join(folder, "id.pub")
        with open(path, "w", encoding="ascii", errors="replace") as stream:
            stream.write(public_key.strip() + "\n")
        owner = re.sub(r"[^\w.@:/+-]", "?", lease.terms.owner, flags=re.ASCII)
        argv = [
            "ssh-keygen",
            "-q",
            "-s",
            ca_key,
            "-I",
            f"lease {lease.id} {owner} cluster {cluster}",
            "-z",
            str(secrets.randbits(63)),
            "-n",
            ",".join(principal(node.id or "") for node in lease.nodes),
            "-V",
            f"-{SKEW}s:+{left}s",
            path,
        ]
        if _run(["ssh-keygen", "-l", "-f", path]).returncode:
            raise LeaseError(
                Reason.BAD_REQUEST,
                "public_key is not a valid public key, or of a type unknown here",
            )
        done = _run(argv)
        if done.returncode:
            raise OSError(
                f"ssh-keygen cannot sign with {ca_key}: {done.stderr.strip() or done.returncode}"
            )
        with open(os.path.join(folder, "id-cert.pub"), encoding="ascii") as stream:
            return stream.read().strip()


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"ssh-keygen has not ended within {TIMEOUT:g} s") from None
