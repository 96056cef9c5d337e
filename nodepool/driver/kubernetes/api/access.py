"""Access to the cluster: kubeconfig, exec plug-ins, or the account of our own pod (KUB-3)."""

from __future__ import annotations

import base64
import os
import threading
from typing import Any

from nodepool.base import optional
from nodepool.cloud.http import NoAccess


def _files() -> str:
    return os.environ.get("KUBECONFIG") or "~/.kube/config"


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
        #: Whether it is the account of the pod that the launcher runs in.
        self.in_cluster = False
        self._configuration = self._read()
        self.host: str = str(self._configuration.host).rstrip("/")
        self.verify_ssl = bool(self._configuration.verify_ssl)
        self.proxy: str | None = self._configuration.proxy

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
            kube_config.load_kube_config(  # type: ignore[no-untyped-call]
                # Passed explicitly, because the library read the environment when it was imported.
                config_file=_files(),
                context=self._context,
                client_configuration=configuration,
                persist_config=False,
            )
            return configuration
        except FileNotFoundError:
            pass
        except ConfigException as error:
            if "no configuration found" not in str(error).lower():
                raise NoAccess(f"{_place(self._context)} cannot be used: {error}") from error
        except Exception as error:
            raise NoAccess(f"{_place(self._context)} cannot be used: {type(error).__name__}: {error}") from error
        try:
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except ConfigException as error:
            raise NoAccess(
                f"the kubeconfig file does not exist ({_place(self._context)}), and this is not a pod of a cluster ({error}); "
                "write one, or set KUBECONFIG for the launcher"
            ) from error
        self.in_cluster = True
        return configuration

    def authorization(self) -> str | None:
        """Return the current header value; None with client certificates. Raises NoAccess."""
        with self._lock:
            try:
                found = self._configuration.auth_settings().get("BearerToken")
            except Exception as error:
                raise NoAccess(f"{_place(self._context)}: no token: {type(error).__name__}: {error}") from error
        return str(found["value"]) if found and found.get("value") else None

    def renew(self) -> None:
        """Read refused credentials again. Raises NoAccess."""
        with self._lock:
            self._configuration = self._read()

    def tls(self) -> dict[str, Any]:
        """Return the options of urllib3 for the connection."""
        configuration = self._configuration
        options: dict[str, Any] = {
            "cert_reqs": "CERT_REQUIRED" if self.verify_ssl else "CERT_NONE",
            "ca_certs": configuration.ssl_ca_cert,
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
