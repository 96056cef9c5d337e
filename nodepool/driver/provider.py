"""Driver and Provider: plug-in interfaces (DRV-2, DRV-4)."""

from __future__ import annotations

import abc
import functools
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nodepool.base.files import FileIdentity
from nodepool.base.problems import LabelProblems
from nodepool.cloud.calls import CloudCalls
from nodepool.cloud.sold_out import SoldOut
from nodepool.config.model import ProviderConfig
from nodepool.driver.request.base import RequestHandler, RequestHost

if TYPE_CHECKING:
    from nodepool.zk.zookeeper import Node, NodeRequest, ZooKeeper


class Driver(metaclass=abc.ABCMeta):
    """One instance per process and driver; shared by all threads."""

    name: str

    def reset(self) -> None:
        """Drop cached global state; called at every configuration load."""
        return

    def configFiles(self) -> dict[str, FileIdentity | None]:
        """Return the driver's configuration files; when one changes, everything is reloaded.

        With the modification times (ns) from just before the reading, None for a file that is
        missing. Called after the providers were loaded. New here, 11.0.0 does not call it.
        """
        return {}

    @abc.abstractmethod
    def getProviderConfig(self, provider: dict[str, Any]) -> ProviderConfig:
        """Return the not yet loaded configuration for the YAML dict *provider*."""

    @abc.abstractmethod
    def getProvider(self, provider_config: Any) -> Provider:
        """Return a new, not started provider."""


class Execution(Protocol):
    """A program that runs on a node. One thread may read while another one writes."""

    #: Exit status, or minus the number of the signal that ended it; None: not known (yet).
    status: int | None

    def read(self, timeout: float) -> tuple[int, bytes] | None:
        """Return the next output: 1 (stdout) or 2 (stderr), and data; None: the program has ended.

        :raises TimeoutError: there was no output for ``timeout`` seconds.
        :raises RemoteException: the connection broke; the program is killed.
        """

    def write(self, data: bytes, timeout: float) -> None:
        """Send input; empty data is its end. Raises the same errors, for input that is not read."""

    def close(self) -> None:
        """Kill the program if it still runs; from any thread."""


class ProviderNotifications:
    """Optional notifications for a provider."""

    def nodeDeletedNotification(self, node: Node) -> None:
        """Handle the removal of the znode of *node*."""


class Provider(ProviderNotifications):
    """A running provider. Methods that a driver does not implement keep these defaults."""

    # When a request cannot get its next node: pause (True) or return the request (False).
    PAUSE_AT_QUOTA = True

    provider: ProviderConfig
    #: For drivers that call their cloud with :class:`~nodepool.cloud.calls.CloudCalls`.
    cloud_calls: CloudCalls | None = None
    #: For drivers whose labels have offers.
    sold_out: SoldOut[Any] | None = None
    #: The thread on which the provider finishes its launches after ``stop``.
    stop_thread: threading.Thread | None = None

    @functools.cached_property
    def label_problems(self) -> LabelProblems:
        """Return the labels that do not work, and why. Not in 11.0.0."""
        return LabelProblems(self.provider.name)

    def start(self, zk_conn: ZooKeeper | None) -> None:
        """Start background work; an exception means that the provider is not used."""

    def idle(self) -> None:
        """Stop anything that might fight with a successor of the same name."""

    def stop(self) -> None:
        """Accept no new work; must not block."""

    def join(self) -> None:
        """Wait until all work is done."""

    def labelReady(self, name: str) -> bool:
        """Return True when the label could be served, apart from quota."""
        return True

    def startNodeCleanup(self, node: Node) -> Any:
        """Start deleting the locked *node*; return an object with ``join()``."""
        raise NotImplementedError(f"{type(self).__name__}.startNodeCleanup")

    def cleanupNode(self, node_id: object) -> None:
        """Delete the resource; raise ``exceptions.NotFound`` when it does not exist."""
        raise NotImplementedError(f"{type(self).__name__}.cleanupNode")

    def waitForNodeCleanup(self, node_id: object) -> None:
        """Wait until the resource is deleted."""

    def cleanupLeakedResources(self) -> None:
        """Find and remove leaks; called every minute."""

    def getRequestHandler(self, poolworker: RequestHost, request: NodeRequest) -> RequestHandler:
        """Return a NodeRequestHandler; must be cheap."""
        raise NotImplementedError(f"{type(self).__name__}.getRequestHandler")

    def sold_out_offers(self) -> str:
        """Return the offers that are sold out, with the times; empty if none is."""
        return self.sold_out.describe() if self.sold_out is not None else ""

    @property
    def leak_search_stopped(self) -> str | None:
        """Return why leaked resources are not deleted at present; None if nothing prevents it."""
        return None

    def listNodes(self) -> Iterable[Any]:
        """Return objects with ``id`` and ``metadata``; for tools only."""
        return []

    def errorLabels(self) -> Iterable[str]:
        """Return the labels known to be permanently broken."""
        return []

    def uploadImage(
        self,
        provider_image: object,
        image_name: str,
        filename: str,
        image_type: str | None = None,
        meta: dict[str, Any] | None = None,
        md5: str | None = None,
        sha256: str | None = None,
    ) -> Any:
        """Upload and return the external id; only if images are managed."""
        raise NotImplementedError(f"{type(self).__name__}.uploadImage")

    def deleteImage(self, name: str, id: str) -> None:
        """Delete the image with external name *name* and external id *id*."""
        raise NotImplementedError(f"{type(self).__name__}.deleteImage")

    def discardImage(self, name: str, id: str) -> None:
        """Delete the image of an unfinished upload, even if the upload has protected it."""
        self.deleteImage(name, id)

    def describeHosts(self) -> list[dict[str, Any]]:
        """Describe the provider's own hosts for operators, without waiting.

        Keys: ``name``, ``usable``, ``problem``, ``used`` and ``limits``.
        The last two are amounts by resource. Not in 11.0.0.
        """
        return []

    def execute(
        self,
        node: Node,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        user: str = "",
        timeout: float = 30.0,
    ) -> Execution | None:
        """Start a program on *node* without SSH; None: this driver cannot. Not in 11.0.0.

        :param user: account on the node; default: the node's username.
        :param timeout: seconds for the start.
        :raises RemoteException: it cannot be started; the text says why.
        """
        return None

    def removeUnfinishedUpload(self, name: str, since: float) -> None:
        """Remove the remains, except images, of an upload that started at *since* (Unix
        seconds).
        """
