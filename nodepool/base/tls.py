"""TLS contexts of processes that run longer than their certificates are valid."""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable

from nodepool.base.files import file_identity

log = logging.getLogger("nodepool.tls")


def trusting(authority: str | None) -> ssl.SSLContext:
    """Return a client's context for servers whose authority the configuration names.

    Since Python 3.13, the default refuses certificates without extensions that other programs do
    not need: ``openssl req -x509`` and clusters create such ones.

    :param authority: path of its certificate; None: those of the system.
    :raises OSError: it cannot be used.
    """
    context = ssl.create_default_context(cafile=authority)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


class TlsContext:
    """A context that is loaded again when its files have changed. Thread-safe.

    :param load: returns a new context.
    :param paths: of the files that it reads; None: not used.
    :raises OSError: the files cannot be used.
    """

    def __init__(self, load: Callable[[], ssl.SSLContext], *paths: str | None) -> None:
        self._load = load
        self._paths = [path for path in paths if path]
        self._lock = threading.Lock()
        self._seen = self._identities()
        self._context = load()

    def _identities(self) -> list[object]:
        return [file_identity(path) for path in self._paths]

    def current(self) -> ssl.SSLContext:
        """Return the context of the files; the former one as long as they cannot be used.

        Between the renewals of a certificate and of its key, they do not match.
        """
        with self._lock:
            # Before the files are read, so that a change in between is noticed by the next call.
            seen = self._identities()
            if seen != self._seen:
                self._seen = seen
                try:
                    self._context = self._load()
                    log.info("Certificates loaded again: %s", ", ".join(self._paths))
                except OSError as error:
                    log.warning(
                        "Changed certificates cannot be used, keeping the former ones until the "
                        "next change of %s: %s",
                        ", ".join(self._paths),
                        error,
                    )
            return self._context
