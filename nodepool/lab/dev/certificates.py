"""Certificates for one installation on one machine."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from nodepool.base.files import replace_file

#: Each new directory gets new certificates.
LIFETIME = datetime.timedelta(days=3650)
#: Clocks of two daemons may differ.
LEEWAY = datetime.timedelta(days=1)


def create(directory: Path) -> None:
    """Write ``ca.pem``, and ``cert.pem`` with ``key.pem`` for servers and clients.

    All daemons run as the same user, so they share a key; that of the authority is not stored.
    """
    authority_key, key = (
        ec.generate_private_key(ec.SECP256R1()),
        ec.generate_private_key(ec.SECP256R1()),
    )
    issuer = _name("nodepool dev authority")
    authority = _builder(issuer, issuer, authority_key.public_key())
    authority = authority.add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    names: list[x509.GeneralName] = [
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    ]
    certificate = _builder(_name("localhost"), issuer, key.public_key())
    certificate = certificate.add_extension(x509.SubjectAlternativeName(names), critical=False)
    for name, builder in (("ca", authority), ("cert", certificate)):
        signed = builder.sign(authority_key, hashes.SHA256())
        replace_file(
            str(directory / f"{name}.pem"), signed.public_bytes(serialization.Encoding.PEM)
        )
    encoding = (
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    replace_file(str(directory / "key.pem"), key.private_bytes(*encoding))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _builder(subject: x509.Name, issuer: x509.Name, key: Any) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
        .not_valid_before(now - LEEWAY)
        .not_valid_after(now + LIFETIME)
    )
