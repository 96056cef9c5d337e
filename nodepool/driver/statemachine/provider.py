"""The provider of all state machine drivers (DRV-7.6)."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable
from typing import Any

from nodepool import exceptions
from nodepool.base import threads
from nodepool.cloud.calls import CloudCalls
from nodepool.cloud.sold_out import SoldOut
from nodepool.config.model import ConfigPool, ProviderConfig, cloud_image
from nodepool.driver.quota.amounts import QuotaInformation
from nodepool.driver.request.base import RequestHost
from nodepool.driver.statemachine.deleter import StateMachineNodeDeleter
from nodepool.driver.statemachine.handler import StateMachineHandler
from nodepool.driver.statemachine.launcher import StateMachineNodeLauncher
from nodepool.driver.statemachine.leaks import LeakSearch
from nodepool.driver.statemachine.model import Adapter, DriverLabel, ExternalId
from nodepool.driver.statemachine.shared_offers import SharedOffers
from nodepool.driver.statemachine.stage import LaunchProvider
from nodepool.zk import zookeeper as zk
from nodepool.zk.zookeeper import ZooKeeper

#: Threads for the first part of launches.
START_THREADS = 8


class StateMachineProvider(LaunchProvider):
    """Runs create machines on one thread and delete machines on another."""

    def __init__(self, adapter: Adapter, provider: ProviderConfig) -> None:
        super().__init__(adapter, provider)
        # Adapters of others may use this name for something else.
        calls = getattr(adapter, "calls", None)
        self.cloud_calls = calls if isinstance(calls, CloudCalls) else None
        sold_out = getattr(adapter, "sold_out", None)
        self.sold_out = sold_out if isinstance(sold_out, SoldOut) else None
        self._zk = None  # type: ignore[assignment]
        self.running = False
        self.error_labels: set[str] = set()
        self._error_since: dict[str, float] = {}
        #: By pool and label: each pool may have another flavor for it.
        self.label_quota_cache: dict[tuple[str, str], QuotaInformation] = {}
        self._leaks = LeakSearch(provider.name, adapter, self.log)

    # -- life

    def start(self, zk_conn: ZooKeeper | None) -> None:
        self._zk = zk_conn  # type: ignore[assignment]
        self.running = True
        self.log.debug("Starting")
        if self.sold_out is not None and zk_conn is not None and zk_conn.note_tree is not None:
            shared = SharedOffers(zk_conn, self.provider.name, self.clock)
            self.sold_out.share(shared.left, shared.write)
        self.nodescan_worker.start()
        self.state_machine_start_worker = threads.shared().lane(
            f"start-{self.provider.name}", START_THREADS
        )
        self.create_loop.start()
        self.delete_loop.start()

    def stop(self) -> None:
        """Accept no new work; running machines finish in the background."""
        if not self.running or self.stop_thread is not None:
            return
        self.log.debug("Stopping")
        self.stop_thread = threading.Thread(
            target=self._stop, name=f"Thread-stop-{self.provider.name}", daemon=True
        )
        self.stop_thread.start()

    def _stop(self) -> None:
        self._quota_stopping.set()
        self.create_loop.stop(drain=not self._abandon)
        self.create_loop.join()
        self.delete_loop.stop(drain=not self._abandon)
        self.delete_loop.join()
        self.running = False
        self.nodescan_worker.stop()
        self.nodescan_worker.join()
        if self.state_machine_start_worker is not None:
            self.state_machine_start_worker.shutdown(
                wait=not self._abandon, cancel_futures=self._abandon
            )
        self.adapter.stop()
        self.log.debug("Stopped")

    _abandon = False

    def abandon(self) -> None:
        """Stop quickly at the end of the process; unfinished machines are left to the next
        start.
        """
        self._abandon = True
        self.create_loop.stop(drain=False)
        self.delete_loop.stop(drain=False)

    def join(self) -> None:
        if self.stop_thread is not None:
            self.stop_thread.join()

    # -- launching and deleting

    @property
    def launchers(self) -> list[StateMachineNodeLauncher]:
        """Return the running launches."""
        return list(self.create_loop.machines)

    @property
    def deleters(self) -> list[StateMachineNodeDeleter]:
        """Return the running deletions."""
        return list(self.delete_loop.machines)

    def getRequestHandler(
        self, poolworker: RequestHost, request: zk.NodeRequest
    ) -> StateMachineHandler:
        return StateMachineHandler(poolworker, request)

    def startNodeCleanup(self, node: zk.Node) -> StateMachineNodeDeleter:
        """Start a deletion. Raises LoopEnded: the provider accepts no new work any more."""
        deleter = StateMachineNodeDeleter(self._zk, self, node)
        self.delete_loop.add(deleter)
        return deleter

    def waitForNodeCleanup(self, node_id: object) -> None:
        raise NotImplementedError

    def labelReady(self, label: DriverLabel) -> bool:
        if self.adapter.labelReady(label):
            self.label_problems.clear(label.name, "image")
            return True
        if cloud_image(label) is not None:
            reason = self.adapter.whyNotReady(label)
            self.label_problems.note(
                label.name,
                "image",
                reason
                or (
                    f"cloud image {label.cloud_image.name} (option cloud-image) is not available "
                    "in the cloud"
                ),
            )
        return False

    #: Seconds after which a failed label is tried again: the cloud may now have what was missing.
    ERROR_LABEL_RETRY = 60.0

    def errorLabels(self) -> Iterable[str]:
        now = self.clock.monotonic()
        for label, since in list(self._error_since.items()):
            if now - since > self.ERROR_LABEL_RETRY:
                self._error_since.pop(label, None)
                self.label_quota_cache = {
                    key: known for key, known in self.label_quota_cache.items() if key[1] != label
                }
                self.error_labels.discard(label)
        return self.error_labels

    def listNodes(self) -> Iterable[Any]:
        return self.adapter.listInstances()

    def checksHost(self, node: zk.Node) -> bool:
        """Return whether launchers connect to this node: its SSH host keys are known, or are read
        when a node of its label is launched (``host-key-checking``).
        """
        pool = self.provider.pools.get(node.pool or "")
        labels = [pool.labels[name] for name in node.type if name in pool.labels] if pool else []
        return bool(node.host_keys) or all(label.host_key_checking for label in labels)

    def findMissingNodes(self, nodes: Iterable[zk.Node]) -> list[zk.Node]:
        """Return the nodes whose instance is certainly deleted, stopped or reclaimed."""
        known = list(nodes)
        missing = self.adapter.findMissingInstances([node.external_id for node in known])
        return [node for node in known if node.external_id in missing]

    # -- quota

    def getProviderLimits(self) -> QuotaInformation:
        try:
            return self.adapter.getQuotaLimits()
        except NotImplementedError:
            return QuotaInformation(default=math.inf)

    def quotaNeededByLabel(self, label: str, pool: ConfigPool) -> QuotaInformation:
        """Return the label's needs; one that cannot work needs nothing, and is not offered."""
        known = self.label_quota_cache.get((pool.name, label))
        if known is not None:
            return known
        needed = QuotaInformation()
        try:
            needed = self.adapter.getQuotaForLabel(pool.labels[label]) or needed
            self.label_problems.clear(label, "flavor")
        except exceptions.RuntimeConfigurationException as error:
            self.label_problems.note(label, "flavor", error)
            self.log.error(
                "Label %s of provider %s cannot work: %s", label, self.provider.name, error
            )
            self.error_labels.add(label)
            self._error_since[label] = self.clock.monotonic()
        except NotImplementedError:
            pass
        self.label_quota_cache[pool.name, label] = needed
        return needed

    def unmanagedQuotaUsed(self) -> QuotaInformation:
        """Return the use of everything visible except the instances in our records."""
        used = QuotaInformation()
        name = self.provider.name
        # Records before and after the listing: instances are created and deleted meanwhile.
        known = {node.id for node in self._zk.getProviderNodes(name)}
        instances = list(self.adapter.listInstances())
        known |= {node.id for node in self._zk.getProviderNodes(name)}
        for instance in instances:
            metadata = getattr(instance, "metadata", None) or {}
            if (
                metadata.get("nodepool_provider_name") == name
                and metadata.get("nodepool_node_id") in known
            ):
                continue
            with contextlib.suppress(NotImplementedError):
                used.add(instance.getQuotaInformation())
        return used

    # -- leaks and images

    @property
    def possibly_leaked_nodes(self) -> dict[Any, Any]:
        """Resources that were seen once without a record."""
        return self._leaks.nodes

    @property
    def possibly_leaked_uploads(self) -> dict[Any, Any]:
        return self._leaks.uploads

    @property
    def leak_search_stopped(self) -> str | None:
        return self._leaks.stopped

    def cleanupLeakedResources(self) -> None:
        try:
            self.adapter.periodic()
        finally:
            self._leaks.run(self._zk)

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
        return self.adapter.uploadImage(
            provider_image,
            image_name,
            filename,
            image_format=image_type,
            metadata={**(meta or {}), "nodepool_provider_name": self.provider.name},
            md5=md5,
            sha256=sha256,
        )

    def deleteImage(self, name: str, id: ExternalId) -> None:
        self.adapter.deleteImage(external_id=id)

    def discardImage(self, name: str, id: ExternalId) -> None:
        self.adapter.discardImage(external_id=id)

    def describeHosts(self) -> list[dict[str, Any]]:
        return self.adapter.describeHosts()

    def removeUnfinishedUpload(self, name: str, since: float) -> None:
        self.adapter.removeUnfinishedUpload(name, since)
