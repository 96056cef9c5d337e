"""The dates of our TLS certificates: servers refuse invalid ones without saying so."""

from __future__ import annotations

import datetime
import pathlib
from collections.abc import Iterable


def why_invalid(files: Iterable[tuple[str, str | None]]) -> str:
    """Return which certificate is not valid now, with a suggestion, or an empty text.

    :param files: option of ``zookeeper-tls`` and path.
    """
    from cryptography import x509  # paramiko requires it, too; only needed when no connection can be established

    now = datetime.datetime.now(datetime.UTC)
    for option, path in files:
        try:
            certificate = x509.load_pem_x509_certificate(pathlib.Path(path or "").read_bytes())
        except (OSError, ValueError):
            continue  # kazoo reports files that cannot be used
        start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if end < now:
            return f"zookeeper-tls: {option}: {path} expired at {end:%Y-%m-%d %H:%M:%S UTC}. Suggestion: renew the certificate"
        if start > now:
            return (
                f"zookeeper-tls: {option}: {path} is not valid before {start:%Y-%m-%d %H:%M:%S UTC}. Suggestion: check the clock"
                " of this host, or the certificate"
            )
    return ""
