"""Access to the cluster: kubeconfig, exec plug-ins, or the account of our own pod (KUB-3)."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import logging
import logging.handlers
import os
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import yaml

from nodepool.base import optional
from nodepool.base.tls import trusting
from nodepool.cloud.http import NoAccess

#: Seconds for which a token is used before the library is asked again: while a token has less than
#: 5 minutes left, it runs an exec plug-in for each request.
TOKEN_USE = 30.0


def _files() -> str:
    return os.environ.get("KUBECONFIG") or "~/.kube/config"


def _current_context() -> str | None:
    """Return the context of the first file that names one, as kubectl does.

    The library uses that of the last.
    """
    for path in _files().split(os.pathsep):
        with contextlib.suppress(OSError, yaml.YAMLError):  # the library reports them
            with open(os.path.expanduser(path), encoding="utf-8") as file:
                content = yaml.safe_load(file)
            if isinstance(content, dict) and content.get("current-context"):
                return str(content["current-context"])
    return None


@contextlib.contextmanager
def _root_errors() -> Iterator[list[logging.LogRecord]]:
    """Collect errors of the root logger.

    The library reports a failing exec plug-in there only.
    """
    handler = logging.handlers.BufferingHandler(capacity=1000)
    handler.setLevel(logging.ERROR)
    logging.getLogger().addHandler(handler)
    try:
        yield handler.buffer
    finally:
        logging.getLogger().removeHandler(handler)


def _port(url: str) -> int:
    """Return the port of a server. Raises ValueError."""
    parts = urllib.parse.urlsplit(url)
    return parts.port or {"https": 443}.get(parts.scheme, 80)


def _is_excluded(url: str, excluded: str) -> bool:
    """Return whether NO_PROXY names the host: its name, domain, address or network."""
    parts = urllib.parse.urlsplit(url)
    if urllib.request.proxy_bypass(f"{parts.hostname}:{_port(url)}", {"no": excluded}):
        return True
    for text in excluded.split(","):
        with contextlib.suppress(ValueError):  # one of them is a name
            network = ipaddress.ip_network(text.strip(), strict=False)
            if ipaddress.ip_address(parts.hostname or "") in network:
                return True
    return False


def _place(context: str | None) -> str:
    """Return the paths of the files, for messages."""
    return f"context {context} of {_files()}" if context else f"the current context of {_files()}"


class KubeconfigAccess:
    """Access read by the package ``kubernetes``, which supports all types of authentication.

    :raises NoAccess: it cannot be used.
    """

    def __init__(self, context: str | None) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._header: str | None = None
        #: Until when the header is used (monotonic seconds).
        self._used_until = 0.0
        #: Whether it is the account of the pod that the launcher runs in.
        self.in_cluster = False
        self._configuration = self._read()
        self.host: str = str(self._configuration.host).rstrip("/")
        self.verify_ssl = bool(self._configuration.verify_ssl)
        self.proxy = self._proxy()

    def _proxy(self) -> str | None:
        """Return the proxy of the kubeconfig or the environment, unless NO_PROXY names the host."""
        found: str | None = self._configuration.proxy
        return None if _is_excluded(self.host, self._configuration.no_proxy or "") else found

    def _read(self) -> Any:
        try:
            from kubernetes.client import Configuration
            from kubernetes.config import kube_config
            from kubernetes.config.config_exception import ConfigException
            from kubernetes.config.incluster_config import load_incluster_config
        except ImportError as error:
            raise NoAccess(f"it needs {optional.missing(['kubernetes']) or error}") from error
        configuration = Configuration()
        try:
            with _root_errors() as errors:
                kube_config.load_kube_config(  # type: ignore[no-untyped-call]
                    # Passed explicitly, because the library read the environment when it was
                    # imported.
                    config_file=_files(),
                    context=self._context or _current_context(),
                    client_configuration=configuration,
                    persist_config=False,
                )
            texts = [
                each.getMessage()
                for each in errors
                if (each.name, each.thread) == ("root", threading.get_ident())
            ]
            if texts and not configuration.api_key and not configuration.cert_file:
                raise NoAccess(f"{_place(self._context)}: no token: {texts[-1]}")
            _port(configuration.host)
            return configuration
        except NoAccess:
            raise
        except FileNotFoundError:
            pass
        except ConfigException as error:
            if "no configuration found" not in str(error).lower():
                raise NoAccess(f"{_place(self._context)} cannot be used: {error}") from error
        except Exception as error:
            raise NoAccess(
                f"{_place(self._context)} cannot be used: {type(error).__name__}: {error}"
            ) from error
        try:
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except ConfigException as error:
            raise NoAccess(
                f"the kubeconfig file does not exist ({_place(self._context)}), and this is not a "
                f"pod of a cluster ({error}); "
                "write one, or set KUBECONFIG for the launcher"
            ) from error
        self.in_cluster = True
        return configuration

    def authorization(self) -> str | None:
        """Return the current header value; None with client certificates. Raises NoAccess."""
        with self._lock:
            if time.monotonic() < self._used_until:
                return self._header
            try:
                found = self._configuration.auth_settings().get("BearerToken")
            except Exception as error:
                raise NoAccess(
                    f"{_place(self._context)}: no token: {type(error).__name__}: {error}"
                ) from error
            self._header = str(found["value"]) if found and found.get("value") else None
            self._used_until = time.monotonic() + TOKEN_USE
            return self._header

    def renew(self) -> None:
        """Read refused credentials again. Raises NoAccess."""
        with self._lock:
            self._configuration = self._read()
            self._used_until = 0.0

    def tls(self) -> dict[str, Any]:
        """Return the options of urllib3 for the connection. Raises NoAccess."""
        configuration, context = self._configuration, None
        if self.verify_ssl:
            try:
                context = trusting(configuration.ssl_ca_cert)
            except OSError as error:
                raise NoAccess(
                    f"{_place(self._context)}: certificate-authority cannot be used: {error}"
                ) from error
        options: dict[str, Any] = {
            "cert_reqs": "CERT_REQUIRED" if self.verify_ssl else "CERT_NONE",
            "ssl_context": context,
            "cert_file": configuration.cert_file,
            "key_file": configuration.key_file,
        }
        if configuration.tls_server_name:
            options["server_hostname"] = options["assert_hostname"] = configuration.tls_server_name
        elif configuration.assert_hostname is not None:
            options["assert_hostname"] = configuration.assert_hostname
        return {key: value for key, value in options.items() if value is not None}

    def token(self) -> str | None:
        """Return the token without its scheme, for Zuul. Raises NoAccess."""
        header = self.authorization()
        return header.split()[-1] if header else None

    def ca(self) -> str | None:
        """Return the CA certificate as base64 of its file; None: there is none."""
        path = self._configuration.ssl_ca_cert
        if not path:
            return None
        with open(path, "rb") as file:
            return base64.b64encode(file.read()).decode()
