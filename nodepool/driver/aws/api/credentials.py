"""Credentials in files that change: rotated keys need no restart, unlike in boto3."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from botocore.credentials import CredentialProvider, CredentialResolver, Credentials, ReadOnlyCredentials
from botocore.exceptions import BotoCoreError, NoCredentialsError

from nodepool.base.files import file_identity

log = logging.getLogger("nodepool.AwsCredentials")

SEARCH_INTERVAL = 10.0
"""Seconds between two searches for credentials where there were none."""
_FILES = {"shared-credentials-file": "credentials_file", "config-file": "config_file"}
"""Providers of the library that read a file, and the setting that names it."""


class FileCredentials(Credentials):
    """Credentials of a file, reread after changes; keeps the last ones if it is unusable."""

    def __init__(self, first: Credentials, path: str, stamp: object, load: Callable[[], Credentials | None]) -> None:
        super().__init__(first.access_key, first.secret_key, first.token, first.method, getattr(first, "account_id", None))
        self._path = path
        self._stamp = stamp
        self._load = load
        self._lock = threading.Lock()

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """Return the credentials; the library calls this for each request."""
        with self._lock:
            stamp = file_identity(self._path)
            if stamp != self._stamp:
                self._renew(stamp)
            return super().get_frozen_credentials()

    def _renew(self, stamp: object) -> None:
        try:
            found = self._load()
        except BotoCoreError as error:
            log.warning("Reading %s failed, keeping the previous credentials: %s", self._path, error)
            found = None
        self._stamp = stamp
        if found is not None:
            self.access_key, self.secret_key, self.token = found.access_key, found.secret_key, found.token
            self.account_id = getattr(found, "account_id", None)
            log.info("Credentials of %s are read again", self._path)


class _FileProvider(CredentialProvider):
    """One of the library's providers, with credentials that are reread after changes."""

    def __init__(self, inner: CredentialProvider, path: str) -> None:
        self.METHOD = inner.METHOD
        self.CANONICAL_NAME = inner.CANONICAL_NAME
        self._inner = inner
        self._path = os.path.expanduser(path)

    def load(self) -> Credentials | None:
        stamp = file_identity(self._path)
        found = self._inner.load()
        return None if found is None else FileCredentials(found, self._path, stamp, self._inner.load)


class LateCredentials:
    """Stand-in while there are no credentials; retries every few seconds when they are needed."""

    method = "late"
    account_id = None

    def __init__(self, find: Callable[[], Any]) -> None:
        self._find = find
        self._found: Any = None
        self._searched = time.monotonic()
        self._lock = threading.Lock()

    def get_frozen_credentials(self) -> Any:
        """Return the credentials. Raises NoCredentialsError: there are still none."""
        with self._lock:
            if self._found is None and time.monotonic() - self._searched >= SEARCH_INTERVAL:
                self._found = self._find()
                self._searched = time.monotonic()
            if self._found is None:
                raise NoCredentialsError()
            return self._found.get_frozen_credentials()

    def get_deferred_property(self, name: str) -> Callable[[], Any]:
        return lambda: getattr(self._found, name, None)


class _LateProvider(CredentialProvider):
    METHOD = "late"
    CANONICAL_NAME = "Late"

    def __init__(self, others: list[CredentialProvider]) -> None:
        self._others = CredentialResolver(others)

    def load(self) -> LateCredentials:
        return LateCredentials(self._others.load_credentials)


def prepare(core: Any) -> None:
    """Let a session of botocore, not used yet, notice changed and late credentials."""
    resolver = core.get_component("credential_provider")
    for index, inner in enumerate(resolver.providers):
        setting = _FILES.get(inner.METHOD)
        path = core.get_config_variable(setting) if setting else None
        if path:
            resolver.providers[index] = _FileProvider(inner, path)
    resolver.providers.append(_LateProvider(list(resolver.providers)))
