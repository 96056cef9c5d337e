"""Interface of a cloud driver: adapter and state machines (DRV-7.1 to DRV-7.5)."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from nodepool.config.model import ProviderConfig
from nodepool.driver.utils import QuotaInformation
from nodepool.zk.records import NodeRequest

#: Driver's identifier of an instance or image: a string, or any JSON value. Stored in node and
#: upload records.
ExternalId: TypeAlias = Any
#: A label of the driver's own configuration.
DriverLabel: TypeAlias = Any


class StateMachine:
    """Creates or deletes one resource.

    ``advance`` does one step and must not block.  It is called again immediately while ``state``
    keeps changing, afterwards when ``wake`` is called or ``waiting_future`` finishes, no earlier
    than ``next_wake`` (monotonic seconds) when that is set, and otherwise after one second at the
    latest.
    """

    START = "start"

    def __init__(self) -> None:
        self.state = self.START
        self.external_id: ExternalId = None
        self.complete = False
        self.start_time = time.monotonic()

    #: Set by the framework: makes it advance this machine soon; callable from any thread.
    wake: Callable[[], None] | None = None
    #: Optional hints of the machine to the framework.
    next_wake: float | None = None
    waiting_future: Any = None
    #: Why it makes no progress at present, for the log and the list of problems. Not in 11.0.0.
    trouble: str | None = None

    def advance(self) -> Any:
        """Do the next step; a create machine returns the Instance when it sets ``complete``."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Give up the launch; this machine is not advanced any more. Not in 11.0.0.

        Another machine deletes the resource of ``external_id``; this one removes what a running
        call may still create. Must not block.
        """


class Instance:
    """A virtual machine (or similar) for the launcher (DRV-7.4)."""

    #: Attributes of the node; those of the pool have priority.
    node_attributes: dict[str, Any] | None = None

    def __init__(self) -> None:
        self.ready = False
        self.deleted = False
        self.external_id: ExternalId = None
        self.public_ipv4: str | None = None
        self.public_ipv6: str | None = None
        self.private_ipv4: str | None = None
        self.interface_ip: str | None = None
        self.cloud: str | None = None
        self.az: str | None = None
        self.region: str | None = None
        self.host_id: str | None = None
        self.metadata: dict[str, Any] = {}
        self.driver_data: Any = None
        self.slot: int | None = None
        self.node_properties: dict[str, Any] = {}

    def __repr__(self) -> str:
        state = [name for name in ("ready", "deleted") if getattr(self, name, False)]
        return (
            " ".join([f"<{type(self).__name__} {getattr(self, 'external_id', None)}", *state]) + ">"
        )

    def getQuotaInformation(self) -> QuotaInformation:
        """Return what this instance uses."""
        raise NotImplementedError


class Resource:
    """A resource in the cloud that may leak; ``metadata`` has the nodepool keys (DRV-7.5)."""

    #: Identifier in the cloud; set by the driver.
    id: ExternalId = None

    def __init__(self, metadata: dict[str, Any] | None, type: str) -> None:
        self.type = type
        self.plural_metric_name = type + "s"
        self.metadata = metadata or {}

    def belongs_to(self, external_id: ExternalId) -> bool:
        """Return whether the resource belongs to the node with this id. Not in 11.0.0.

        Called when it is tagged for that node.
        Resources that do not belong to it are leaks. A driver that cannot determine this returns
        True.
        """
        return True


class Adapter:
    """Interface of a cloud for the state machine framework (DRV-7.2)."""

    def __init__(self, provider_config: ProviderConfig) -> None:
        pass

    def stop(self) -> None:
        """Release threads and connections; do not block for long."""

    def getCreateStateMachine(
        self,
        hostname: str,
        label: DriverLabel,
        image_external_id: object,
        metadata: dict[str, str],
        request: NodeRequest,
        az: str | None,
        log: logging.LoggerAdapter[Any] | logging.Logger,
    ) -> StateMachine:
        """Return a machine that creates one instance; called with seven positional arguments."""
        raise NotImplementedError

    def plannedExternalId(self, label: DriverLabel, node_id: str) -> ExternalId:
        """Return the future name of the node's instance if it is known; None: it is not.

        The record contains it before the create machine starts: whatever happens then, the deletion
        knows what to delete. Not in 11.0.0.
        """
        return None

    def getDeleteStateMachine(
        self, external_id: ExternalId, log: logging.LoggerAdapter[Any] | logging.Logger
    ) -> StateMachine:
        """Return a machine that deletes the resource of ``external_id``."""
        raise NotImplementedError

    def listInstances(self) -> Iterable[Instance]:
        """Return all visible instances, ours or not."""
        raise NotImplementedError

    def findMissingInstances(self, external_ids: list[ExternalId]) -> list[ExternalId]:
        """Return the ids of instances that are certainly deleted, stopped or reclaimed.

        Ready nodes on them are not assigned any more.
        Called every minute with the ids of the ready nodes, if any. Must query the cloud each time.
        Not in 11.0.0; a driver without it trusts its records.
        """
        return []

    def periodic(self) -> None:
        """Do housekeeping; called every minute before the search for leaks. Not in 11.0.0."""

    def listResources(self) -> Iterable[Resource]:
        """Return all visible resources that may leak, without changes: commands call it, too."""
        raise NotImplementedError

    def deleteResource(self, resource: Any) -> None:
        """Delete a leaked resource."""
        raise NotImplementedError

    def getQuotaLimits(self) -> QuotaInformation:
        """Return the limits of the account; unlimited unless the cloud knows better."""
        return QuotaInformation(default=math.inf)

    def getQuotaForLabel(self, label: DriverLabel) -> QuotaInformation:
        """Return what one node of the label uses.

        :raises RuntimeConfigurationException: the label can never work.
        """
        return QuotaInformation(instances=1)

    def getAZs(self) -> list[str | None]:
        """Return the zones to choose from when the pool names none."""
        return [None]

    def labelReady(self, label: DriverLabel) -> bool:
        """Return whether the cloud image of the label exists."""
        return True

    def whyNotReady(self, label: DriverLabel) -> str | None:
        """Return why the label is not ready; None: no image in the cloud. Not in 11.0.0."""
        return None

    def uploadImage(
        self,
        provider_image: Any,
        image_name: str,
        filename: str,
        image_format: str | None = None,
        metadata: dict[str, Any] | None = None,
        md5: str | None = None,
        sha256: str | None = None,
    ) -> Any:
        """Upload the image file; returns its external id."""
        raise NotImplementedError

    def deleteImage(self, external_id: ExternalId) -> None:
        """Delete an uploaded image."""
        raise NotImplementedError

    def discardImage(self, external_id: ExternalId) -> None:
        """Delete the image of an unfinished upload. Not in 11.0.0."""
        self.deleteImage(external_id)

    def describeHosts(self) -> list[dict[str, Any]]:
        """Same as :meth:`nodepool.driver.provider.Provider.describeHosts`. Not in 11.0.0."""
        return []

    def removeUnfinishedUpload(self, image_name: str, since: float) -> None:
        """Remove remains, other than images, of an upload started at *since* (s). Not in 11.0.0."""

    def getConsoleLog(self, label: DriverLabel, external_id: ExternalId) -> str | None:
        """Return the console output of the instance, if available."""
        raise NotImplementedError

    def notifyNodescanFailure(self, label: DriverLabel, external_id: ExternalId) -> None:
        """Handle an instance whose host keys could not be read."""
