"""A client certificate that is not valid now is named with its dates, for the commands as well
as in the log.
"""

from __future__ import annotations

import datetime
import logging
import pathlib

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from nodepool.zk import ZooKeeperClient
from tests.conftest import Chroot, wait_for
from tests.support.faults.launcher import Proxy

# kazoo leaves the socket of a refused TLS connection to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


def certificate(
    chroot: Chroot, start: datetime.datetime, end: datetime.datetime, path: pathlib.Path
) -> str:
    """Write a copy of the client's certificate that is valid then, signed by the authority of
    the server.
    """
    old = x509.load_pem_x509_certificate(pathlib.Path(chroot.cert).read_bytes())
    key = serialization.load_pem_private_key(
        pathlib.Path(chroot.ca).with_suffix(".key").read_bytes(), None
    )
    builder = x509.CertificateBuilder(
        old.issuer, old.subject, old.public_key(), x509.random_serial_number(), start, end
    )
    assert isinstance(key, rsa.RSAPrivateKey)
    path.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return str(path)


@pytest.mark.parametrize(
    ("start", "end", "words", "remedy"),
    [
        (-3 * DAY, -DAY, f"expired at {NOW - DAY:%Y-%m-%d %H:%M:%S} UTC", "renew the certificate"),
        (
            DAY,
            3 * DAY,
            f"is not valid before {NOW + DAY:%Y-%m-%d %H:%M:%S} UTC",
            "check the clock of this host",
        ),
    ],
    ids=["expired", "not-yet-valid"],
)
def test_invalid_client_certificate_is_named_with_its_date_and_a_remedy(
    zk_chroot: Chroot,
    tmp_path: pathlib.Path,
    start: datetime.timedelta,
    end: datetime.timedelta,
    words: str,
    remedy: str,
) -> None:
    path = certificate(zk_chroot, NOW + start, NOW + end, tmp_path / "client.pem")
    client = ZooKeeperClient(
        zk_chroot.connection, tls_cert=path, tls_key=zk_chroot.key, tls_ca=zk_chroot.ca
    )
    with pytest.raises(TimeoutError) as caught:
        client.connect(timeout=1)
    assert f"; zookeeper-tls: cert: {path} {words}. Suggestion: {remedy}" in str(caught.value)


def test_daemon_whose_certificate_expires_names_it_when_the_connection_breaks(
    zk_chroot: Chroot, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = certificate(zk_chroot, NOW - DAY, NOW + DAY, tmp_path / "client.pem")
    proxy = Proxy(int(zk_chroot.hosts.rsplit(":", 1)[1]))
    client = ZooKeeperClient(
        proxy.host + zk_chroot.chroot, tls_cert=path, tls_key=zk_chroot.key, tls_ca=zk_chroot.ca
    )
    try:
        client.connect(timeout=20)
        certificate(zk_chroot, NOW - 3 * DAY, NOW - DAY, tmp_path / "client.pem")
        with caplog.at_level(logging.WARNING, "nodepool.zk.ZooKeeperClient"):
            proxy.set("close")
            logged = (
                "suspended; no new work is started until it is restored; zookeeper-tls: "
                f"cert: {path} expired at "
            )
            wait_for(lambda: logged in caplog.text, what="the certificate in the log")
    finally:
        client.disconnect()
        proxy.stop()
