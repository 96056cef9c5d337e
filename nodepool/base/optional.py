"""Optional packages (the extras of setup.cfg) and wheels, and how to install missing ones."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterable

from nodepool.exceptions import ConfigurationError

#: Other wheel of this release -> a module of it, below ``nodepool``.
WHEELS = {
    "nodepool-adapters": "adapters",
    "nodepool-lab": "lab",
    "nodepool-nodemanager": "nodemanager.config",
}
#: Module -> distribution that provides it.
DISTRIBUTIONS = {
    "anyio": "anyio",
    "azure.core": "azure-core",
    "azure.identity": "azure-identity",
    "boto3": "boto3",
    "botocore": "botocore",
    "cryptography": "cryptography",
    "diskimage_builder": "diskimage-builder",
    "google.auth": "google-auth",
    "ibm_boto3": "ibm-cos-sdk",
    "ibm_cloud_sdk_core": "ibm-cloud-sdk-core",
    "jwt": "PyJWT",
    "keystoneauth1": "keystoneauth1",
    "kubernetes": "kubernetes",
    "lxml": "lxml",
    "mcp": "mcp",
    "openstack": "openstacksdk",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "requests": "requests",
    "signxml": "signxml",
    "urllib3": "urllib3",
}

_OPENSTACK = ("openstack", "keystoneauth1")
_KUBERNETES = ("kubernetes", "requests", "urllib3")
#: Built-in driver -> modules that it requires.
OF_DRIVER = {
    "aws": ("boto3", "botocore"),
    "azure": ("requests",),
    "fake": _OPENSTACK,
    "gce": ("google.auth", "requests"),
    "ibmvpc": ("ibm_cloud_sdk_core", "requests"),
    "kubernetes": _KUBERNETES,
    "openshift": _KUBERNETES,
    "openshiftpods": _KUBERNETES,
    "openstack": _OPENSTACK,
}


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of a parent package
        return False
    except ValueError:  # imported without a spec, as in tests or frozen programs
        return sys.modules.get(module) is not None


def _requirements() -> dict[str, str]:
    """Return distribution (lower case) -> requirement for pip; empty if not installed."""
    import importlib.metadata  # not at each start

    lines: list[str] = []
    for name in ("nodepool", *WHEELS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            lines += importlib.metadata.requires(name) or ()
    found = [line.partition(";")[0].strip() for line in lines]
    return {re.split(r"[^\w.-]", line)[0].lower(): line for line in found}


def missing(modules: Iterable[str]) -> str | None:
    """Return the missing modules with the command that installs them; None: none is missing.

    The command does not use the name of an extra: in the package index, this package's name belongs
    to other releases.
    """
    absent = sorted(name for name in modules if not _is_there(name))
    if not absent:
        return None
    known = _requirements()
    wanted = {known.get(DISTRIBUTIONS[name].lower(), DISTRIBUTIONS[name]) for name in absent}
    command = " ".join(shlex.quote(part) for part in sorted(wanted))
    return f"{', '.join(absent)}, not installed here: {sys.executable} -m pip install {command}"


def require(user: str, wheel: str) -> None:
    """Check that another wheel of this release is installed here.

    :param user: the option or command that needs it, for the text of the error.
    :raises ConfigurationError: it is not installed.
    """
    if not _is_there(f"nodepool.{WHEELS[wheel]}"):
        raise ConfigurationError(
            f"{user} needs the wheel {wheel} of this release, which is not installed here; "
            "tools/package wheel makes it"
        )
