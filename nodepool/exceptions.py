"""Exceptions that drivers raise and catch (DRV-9).

``statsd_key`` names the launch result in metrics: ``nodepool.launch.<key>``.
"""

from __future__ import annotations

from collections.abc import Iterable

PathItem = str | int
#: What drivers and their libraries may raise, including SystemExit: sys.exit() in a library must
#: not end our thread.
FOREIGN = (Exception, SystemExit)
#: What is wrong if ZooKeeper refuses a call (``NoAuthError``), and the remedy.
NOT_PERMITTED = (
    "ZooKeeper does not permit this client to change or read a znode; permit everything (cdrwa) to "
    "it in the access control lists of all znodes below the chroot, as with `setAcl -R` of zkCli.sh"
)


class NotFound(Exception):
    """The resource no longer exists; every deletion treats this as success."""


class LaunchNodepoolException(Exception):
    """The launch is impossible, for example because no image is ready."""

    statsd_key = "error.nodepool"


class LaunchStatusException(Exception):
    """The instance is in an error or terminated state."""

    statsd_key = "error.status"


class OfferRefusedException(LaunchStatusException):
    """The cloud lacks what this offer needs; the next attempt tries another offer."""


class LaunchNetworkException(Exception):
    """The instance has no usable address."""

    statsd_key = "error.network"


class LaunchKeyscanException(Exception):
    """The host keys of the instance could not be read."""

    statsd_key = "error.keyscan"


class CapacityException(Exception):
    """The provider has no capacity; counts as a failed attempt."""

    statsd_key = "error.capacity"


class QuotaException(Exception):
    """The quota is exceeded: the launch is aborted and retried when quota becomes free."""


class RuntimeConfigurationException(Exception):
    """The label can never work with this configuration."""


class TimeoutException(Exception):
    """An operation timed out."""


class ConnectionTimeoutException(TimeoutException):
    statsd_key = "error.ssh"


class IPAddTimeoutException(TimeoutException):
    statsd_key = "error.ipadd"


class ServerCreateTimeoutException(TimeoutException):
    statsd_key = "error.servercreatetimeout"


class ServerDeleteTimeoutException(TimeoutException):
    statsd_key = "error.serverdeletetimeout"


class ImageCreateException(TimeoutException):
    statsd_key = "error.imagetimeout"


class RemoteException(Exception):
    """A component on another host has refused a call, or has not answered it."""


class BuilderError(RuntimeError):
    """The image builder failed."""


class BuilderInvalidCommandError(BuilderError):
    """The image building command cannot be run."""


class DibFailedError(BuilderError):
    """diskimage-builder reported a failure."""


class ZKException(Exception):
    """A ZooKeeper operation is invalid in the current state."""


class ZKLockException(ZKException):
    """A lock was not obtained, or was not held."""


class ConfigurationError(Exception):
    """The configuration is invalid; the text says where and how to correct it."""


class ConfigError(ConfigurationError):
    """An invalid option.

    ``where`` is its path from the top of the file; ``file`` and ``line`` are filled in later.
    """

    def __init__(self, message: str, where: Iterable[PathItem] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.where: tuple[PathItem, ...] = tuple(where)
        self.context: list[str] = []
        self.file: str | None = None
        self.line: int | None = None

    def __str__(self) -> str:
        place = list(self.context)
        if self.file:
            place.insert(0, f"{self.file}:{self.line}" if self.line else self.file)
        return f"{self.message} ({', '.join(place)})" if place else self.message


class IncompleteConfiguration(ConfigurationError, RuntimeError):
    """An option is missing that the program requires."""
