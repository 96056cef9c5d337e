"""Launches one node, from its record to ready: attempts, timeouts, scan (DRV-7.7, LAU-9)."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from typing import Any

from kazoo.exceptions import KazooException, NoNodeError, SessionExpiredError

from nodepool import exceptions, metrics
from nodepool.base.backoff import Backoff
from nodepool.base.problems import one_line
from nodepool.cloud import CallsStopped
from nodepool.config.model import ConfigPool, ImageAccess, ProviderConfig, disk_image
from nodepool.driver.statemachine.loop import PollInterval, follow_future
from nodepool.driver.statemachine.model import Instance, StateMachine
from nodepool.driver.statemachine.stage import Serving, Stage
from nodepool.logconfig import Log, get_annotated_logger
from nodepool.metrics import tracing
from nodepool.metrics.launches import StatsReporter
from nodepool.nodescan import NodescanRequest
from nodepool.zk import zookeeper as zk
from nodepool.zk.cluster import CLUSTER_ID, NODE_CREATED
from nodepool.zk.locks import LockHandle
from nodepool.zk.writer import TransactionFailed, Txn

#: Copied from the instance to the node if the instance has them.
IMAGE_OVERRIDES = ("username", "python_path", "shell_type", "connection_port", "connection_type", "host_keys")
CONSOLE_LINES, CONSOLE_LENGTH = 50, 4000
"""Lines and characters of the end of a console that are stored in the node's history."""
DELETE_LIMIT = 600.0
"""Seconds after which an orphan that cannot be deleted is left to the leak cleanup."""
DELETE_BACKOFF = Backoff(0.1, 10.0)
"""Pauses after failed deletions."""
INSTANCE_FIELDS = (
    "external_id",
    "public_ipv4",
    "private_ipv4",
    "public_ipv6",
    "host_id",
    "cloud",
    "region",
    "az",
    "driver_data",
    "slot",
    "node_properties",
)


class StateMachineNodeLauncher(StatsReporter):
    """Runs on the provider's create loop; ``complete`` once the node's state is final."""

    def __init__(self, handler: Serving, node: zk.Node, provider_config: ProviderConfig) -> None:
        super().__init__(handler.pw.nodepool.statsd)
        self.handler = handler
        self.node = node
        self.provider_config = provider_config
        self.zk = handler.zk
        self.manager = handler.manager
        self.log: Log = get_annotated_logger(
            logging.getLogger(f"nodepool.StateMachineNodeLauncher.{provider_config.name}"),
            event_id=handler.request.event_id,
            node_request_id=handler.request.id,
            node_id=node.id,
        )
        self.attempts = 1
        self.retries: int = provider_config.launch_retries
        self.state_machine: StateMachine | None = None
        self.delete_state_machine: StateMachine | None = None
        self._deleted_id: object = None
        self.nodescan_request: NodescanRequest | None = None
        self.start_time = self.manager.clock.monotonic()
        self.launch_start_time = self.start_time
        self.future: Future[Any] | None = None
        self._prepared = False
        self._prepare_error: BaseException | None = None
        self._image_external_id: object = None
        self.stage = Stage.QUEUED
        self._pace = PollInterval()
        self._followed: Future[Any] | None = None
        #: The stored record, and the last one that was sent.
        self._saved_external_id: object = node.external_id
        self._sent_external_id: object = node.external_id
        #: The lock on the record is lost; detected in the next pass.
        self._lost = False
        self._delete_failures = 0
        self._orphan_since = 0.0
        self._runs_since = self.start_time
        #: Why the launch is stalled, as last logged.
        self._trouble: str | None = None

    def __repr__(self) -> str:
        return f"launch of node {self.node.id} ({self.stage.value})"

    @property
    def complete(self) -> bool:
        return self.node.state != zk.BUILDING and self.stage is not Stage.ORPHANED

    @property
    def label(self) -> Any:
        return self.handler.pool.labels[self.node.type[0]]

    # -- start of an attempt

    def prepare(self) -> None:
        """Fill the node from the image; the caller writes it. Errors appear in the first pass."""
        self._prepared = True
        self._prepare_error = None
        try:
            self._fill_from_image()
        except exceptions.FOREIGN as error:
            self._prepare_error = error

    def _fill_from_image(self) -> None:
        label, node = self.label, self.node
        if disk_image(label) is not None:
            name = label.diskimage.name
            upload = self.zk.getMostRecentImageUpload(name, self.provider_config.name, cached=True)
            if upload is None:
                raise exceptions.LaunchNodepoolException(
                    f"Unable to find current cloud image {name} in {self.provider_config.name}"
                )
            image = self.provider_config.diskimages[name]
            self._image_external_id = upload.external_id
            path = self.zk._imageUploadPath(upload.image_name or "", upload.build_id or "", upload.provider_name or "")
            node.image_id = f"{path}/{upload.id}"
        else:
            image = label.cloud_image
            self._image_external_id = None
            node.image_id = image.name
        copy_image(node, image)
        node.resources = dict(self.manager.quotaNeededByLabel(node.type[0], self.handler.pool).get_resources())
        planned = self.manager.adapter.plannedExternalId(label, node.id or "")
        if planned is not None:
            # Written with the rest, by the caller.
            node.external_id = self._saved_external_id = self._sent_external_id = planned

    def launch(self) -> None:
        """Start the launch; slow create machines are created on the provider's start threads.

        :raises LoopEnded: the provider accepts no new work any more.
        """
        self.start_time = self.manager.clock.monotonic()
        with self.manager.create_loop.hold_open():
            if not self.manager.starts_quickly:
                self._start_elsewhere()
            self.manager.launchers.append(self)
            self.manager.create_loop.add(self)

    def _start_elsewhere(self) -> None:
        """Start on a start thread: the adapter may query the cloud, and the loop must not wait."""
        self.future = self.manager.start_executor(self._timed_start)
        self.stage = Stage.STARTING
        self.future.add_done_callback(lambda _future: self.wake())

    def _timed_start(self) -> None:
        started = self.manager.clock.monotonic()
        try:
            self._start()
        finally:
            self.manager.note_start(self.manager.clock.monotonic() - started)

    def wake(self) -> None:
        self.manager.create_loop.wake(self)

    def _start(self) -> None:
        if not self._prepared:
            self.prepare()
            if isinstance(self.node.lock, LockHandle):
                self._save_later()  # an unavailable ZooKeeper is not a failed attempt
            else:
                self._save()
        if self._prepare_error is not None:
            raise self._prepare_error
        node = self.node
        self.start_time = self.manager.clock.monotonic()
        metadata = {
            "nodepool_node_id": node.id or "",
            "nodepool_pool_name": self.handler.pool.name,
            "nodepool_provider_name": self.provider_config.name,
            **self._marks(),
        }
        self.log.info(
            "Creating server with hostname np%s for %s (attempt %s of %s)", node.id, node.type[0], self.attempts, self.retries
        )
        self._note("node-step", step=f"attempt {self.attempts} of {self.retries}: server requested")
        machine = self.manager.adapter.getCreateStateMachine(
            f"np{node.id}", self.label, self._image_external_id, metadata, self.handler.request, node.az, self.log
        )
        machine.wake = self.wake
        self.state_machine = machine

    def _marks(self) -> dict[str, str]:
        """Return the metadata with the tree's history, from the mirror: this must not block."""
        marks = {CLUSTER_ID: self.zk.cluster.id} if self.zk.cluster.id else {}
        known = self.zk.getCachedNode(self.node.id or "") if marks else None
        # Version 0 may be what we have created, with the time of our own clock.
        if known is not None and known.stat is not None and known.stat.version > 0:
            marks[NODE_CREATED] = str(known.stat.ctime)
        return marks

    # -- passes

    def run_pass(self) -> float | None:
        """Run one pass on the create loop; return seconds to the next one, None at the end."""
        if self.complete:
            return None
        if self.stage is Stage.ORPHANED:
            again = self._pass_delete()
            if self.complete:
                self.handler.pw.progress(self.handler)  # its request has waited for this
            return again
        try:
            again = self._pass()
        except (SessionExpiredError, _LockLost):
            self._lose()
            again = 0.0
        except exceptions.QuotaException:
            self.log.info("Aborting node %s due to quota failure", self.node.id)
            self.manager.invalidateQuotaCache()
            self.manager.refusals.failed(self.node.type[0], together=True)
            self.node.external_id = self._external_id()
            self._end(zk.ABORTED, "error.quota", save=True)
            again = None
        except exceptions.FOREIGN as error:
            again = self._failed(error)
        if self.complete:
            return None
        return again

    def _pass(self) -> float | None:
        if self._lost:
            raise _LockLost
        if self.stage in (Stage.STARTING, Stage.REPORTING):
            assert self.future is not None
            if not self.future.done():
                return float(self.manager.MAXIMUM_SLEEP)
            future, self.future = self.future, None
            if self.stage is Stage.REPORTING:
                return self._attempt_ended()
            self.stage = Stage.CREATING
            future.result()
        scan = self.nodescan_request
        if self.stage is Stage.SCANNING and scan is not None and scan.complete:
            self._scanned(scan)
            return 0.0
        left: float = self._timeout() - (self.manager.clock.monotonic() - self.start_time)
        if left <= 0:
            raise exceptions.ServerCreateTimeoutException("Timeout waiting for instance creation")
        bound = min(float(self.manager.MAXIMUM_SLEEP), left)
        if self.stage is Stage.CLEANING:
            return min(bound, self._pass_delete() or 0.0)
        if self.stage is Stage.SCANNING:
            return bound
        if self.stage is Stage.AGAIN:
            self._start_elsewhere()
            return bound
        if self.stage is Stage.QUEUED:
            self.stage = Stage.CREATING
            self._timed_start()
        machine = self.state_machine
        assert machine is not None
        before = machine.state
        instance = machine.advance()
        self._followed = follow_future(machine, self._followed, self.wake)
        if machine.complete and instance is not None:
            self._note("node-step", step="server is running; reading its host keys")
            self._step_ended("create", self.start_time)
            return 0.0 if self._created(instance).complete else bound
        self._tell_trouble(machine.trouble)
        if machine.external_id != self._sent_external_id:
            self.node.external_id = machine.external_id
            self._save_later()
        return self._pace.next(machine, machine.state != before, bound)

    def _tell_trouble(self, trouble: str | None) -> None:
        if trouble is not None and trouble != self._trouble:
            self.log.warning("Launch of node %s is stalled: %s", self.node.id, trouble)
            self.manager.label_problems.note(self.node.type[0], "launch", trouble)
        self._trouble = trouble

    def _timeout(self) -> float:
        return float(self.provider_config.launch_timeout or 3600)

    def _external_id(self) -> Any:
        return self.state_machine.external_id if self.state_machine is not None else self.node.external_id

    def _created(self, instance: Instance) -> NodescanRequest:
        """Store the data of the running machine, then scan its keys."""
        self.stage = Stage.SCANNING
        self._runs_since = self.manager.clock.monotonic()
        copy_instance(self.node, instance, self.handler.pool)
        label = self.label
        boot_timeout = self.provider_config.boot_timeout or 60
        request = NodescanRequest(self.node, label.host_key_checking, boot_timeout, self.log)
        request.on_complete = lambda _request: self.wake()
        self.nodescan_request = request
        self.manager.nodescan_worker.addRequest(request)
        if not request.complete:
            # After a crash the machine can be reached and deleted with this record.
            self._save_later()
        return request

    def _scanned(self, scan: NodescanRequest) -> None:
        keys = scan.result()
        if keys:
            self.node.host_keys = keys
        self._step_ended("scan", self._runs_since)
        self.log.info("Node %s is ready", self.node.id)
        self.manager.label_problems.clear(self.node.type[0], "launch")
        self.manager.refusals.succeeded(self.node.type[0])
        self._end(zk.READY, "ready", save=True)

    def _step_ended(self, step: str, began: float) -> None:
        if self._statsd is not None:
            took = self.manager.clock.monotonic() - began
            self._statsd.timing(metrics.LAUNCH_STEP(self.provider_config.name, step), took * 1000)

    def _note(self, kind: str, **fields: object) -> None:
        """Add an event to the node's history, if the facade publishes events."""
        if tracing.current() is not None:
            self.trace_steps.append((time.time(), str(fields.get("step") or fields.get("reason") or kind)))
        node, feed = self.node, self.zk.feed
        if feed is not None:
            feed.note(kind, node=node.id, request=self.handler.request.id, provider=node.provider, pool=node.pool, **fields)

    # -- failures

    def _failed(self, error: BaseException) -> float | None:
        timed_out = isinstance(error, (exceptions.TimeoutException, exceptions.LaunchKeyscanException))
        if timed_out:
            self.log.warning("Launch attempt %s/%s failed: %s", self.attempts, self.retries, error)
        else:
            self.log.exception("Launch attempt %s/%s failed:", self.attempts, self.retries)
        self._note("launch-failed", attempt=self.attempts, reason=one_line(error))
        self._record(getattr(error, "statsd_key", "error.unknown"))
        if not isinstance(error, (KazooException, CallsStopped)):
            self.manager.label_problems.note(self.node.type[0], "launch", str(error) or repr(error))
        self.manager.nodescan_worker.removeRequest(self.nodescan_request)
        scanned = self.stage is Stage.SCANNING
        self.nodescan_request = self.future = None
        if scanned and self._report_scan_failure():
            return float(self.manager.MAXIMUM_SLEEP)
        return self._attempt_ended()

    def _attempt_ended(self) -> float | None:
        """Start the next attempt, if any, after deleting the remains of this one."""
        external_id = self._external_id()
        self._abandon_machine()
        if external_id is not None:
            self.node.external_id = external_id
        if self.attempts >= self.retries:
            self.node.external_id = external_id
            # Also store that nothing was created after all: an object with the planned name may belong to others.
            self._end(zk.FAILED, None, save=external_id is not None or self._sent_external_id is not None)
            return None
        self.attempts += 1
        self.stage = Stage.AGAIN
        self.state_machine = None
        self._prepared = False
        self.start_time = self.manager.clock.monotonic()
        if external_id is not None:
            self.delete_state_machine = self._delete_machine(external_id)
            self.stage = Stage.CLEANING
        return 0.0

    def _abandon_machine(self) -> None:
        """Abandon the machine: it removes what a call in progress may still create."""
        if self.state_machine is not None:
            try:
                self.state_machine.abandon()
            except Exception:
                self.log.exception("Error giving up the launch of node %s:", self.node.id)

    def _report_scan_failure(self) -> bool:
        """Report a failed scan on another thread: adapters query the cloud for the console."""
        try:
            self.future = self.manager.start_executor(self._scan_failed)
        except RuntimeError:
            return False  # the provider has stopped
        self.stage = Stage.REPORTING
        self.future.add_done_callback(lambda _future: self.wake())
        return True

    def _scan_failed(self) -> None:
        """Report keys that could not be read to the adapter, and log the console."""
        adapter, label, external_id = self.manager.adapter, self.label, self.node.external_id
        try:
            adapter.notifyNodescanFailure(label, external_id)
        except Exception:
            self.log.exception("Unable to report the scan failure of %s:", external_id)
        try:
            console = adapter.getConsoleLog(label, external_id)
        except NotImplementedError:
            return
        except Exception:
            self.log.exception("Unable to get the console log of %s:", external_id)
            return
        lines = (console or "").splitlines()
        for line in lines:
            self.log.info("Console log from hostname np%s: %s", self.node.id, line)
        if lines:
            self._note("console-log", tail="\n".join(one_line(line) for line in lines[-CONSOLE_LINES:])[-CONSOLE_LENGTH:])

    def _delete_machine(self, external_id: object) -> StateMachine:
        machine = self.manager.adapter.getDeleteStateMachine(external_id, self.log)
        machine.wake = self.wake
        self._deleted_id = external_id
        return machine

    def _pass_delete(self) -> float | None:
        """Advance the cleanup of a failed attempt."""
        machine = self.delete_state_machine
        assert machine is not None
        before = machine.state
        try:
            machine.advance()
        except exceptions.NotFound:
            machine.complete = True
        except exceptions.FOREIGN as error:
            return self._delete_failed(error)
        self._followed = follow_future(machine, self._followed, self.wake)
        if machine.complete:
            self._delete_failures = 0
            self.delete_state_machine = None
            self.node.external_id = None
            self._saved_external_id = self._sent_external_id = None
            if self.stage is Stage.ORPHANED:
                self.stage = Stage.ENDED
                return None
            self.stage = Stage.AGAIN
            return 0.0
        return self._pace.next(machine, machine.state != before, float(self.manager.MAXIMUM_SLEEP))

    def _delete_failed(self, error: BaseException) -> float | None:
        """Retry with growing pauses; an orphan only for a while, as its provider may have to end."""
        if self.stage is Stage.ORPHANED and self.manager.clock.monotonic() - self._orphan_since > DELETE_LIMIT:
            self.log.error("Cannot delete %s, leaving it to the leak cleanup: %s", self._deleted_id, error)
            self.delete_state_machine = None
            self.stage = Stage.ENDED
            return None
        level = self.log.exception if self._delete_failures == 0 else self.log.warning
        level("Error deleting %s after a failed launch; retrying: %s", self._deleted_id, error)
        self._delete_failures += 1
        self.delete_state_machine = self._delete_machine(self._deleted_id)
        return DELETE_BACKOFF.pause(self._delete_failures)

    def lock_lost(self) -> None:
        """Record, from any thread, that the record belongs to another launcher now."""
        self._lost = True
        self.wake()

    def _lose(self) -> None:
        """Stop without writing after losing the lock; remove what the record does not contain."""
        self.log.warning("Lost the lock of node %s; giving up the launch", self.node.id)
        external_id = self._external_id()
        self._abandon_machine()
        self.manager.nodescan_worker.removeRequest(self.nodescan_request)
        if external_id is not None and external_id != self._saved_external_id:
            self.stage = Stage.ORPHANED
            self._orphan_since = self.manager.clock.monotonic()
            self.delete_state_machine = self._delete_machine(external_id)
        self._end(zk.FAILED, "error.zksession", save=False)

    def _end(self, state: str, key: str | None, save: bool) -> None:
        """End the launch; the handler writes node and request together when it can."""
        node = self.node
        if state == zk.FAILED and save:
            self._save_later()
        if state in (zk.READY, zk.ABORTED):
            # Before the state: the pool may check at any moment, because another node of the request has ended.
            node.unsaved = True
        node.state = state
        if self.stage is not Stage.ORPHANED:
            self.stage = Stage.ENDED
        if key is not None:
            self._record(key)
        if state == zk.ABORTED or (state == zk.READY and not self.handler.launchesComplete()):
            self._save_later()
        self.handler.pw.progress(self.handler)

    def _record(self, key: str) -> None:
        try:
            self.recordLaunchStats(key, int((self.manager.clock.monotonic() - self.launch_start_time) * 1000))
        except Exception:
            self.log.exception("Unable to report launch stats:")

    # -- writing

    def _save(self) -> None:
        self.zk.storeNode(self.node)
        self._saved_external_id = self._sent_external_id = self.node.external_id

    def _save_later(self) -> None:
        """Write the record without waiting, as long as our lock stands."""
        node = self.node
        if not isinstance(node.lock, LockHandle):
            return
        txn = Txn(self.zk.kazoo_client)
        txn.check(node.lock.path)
        record = node.copy()
        txn.set(f"{self.zk._nodePath(node.id or '')}", record.serialize(), tree=self.zk.node_tree, record=record)
        external_id = self._sent_external_id = node.external_id

        def written(_results: list[Any] | None, error: BaseException | None) -> None:
            if error is None:
                self._saved_external_id = external_id
            elif isinstance(error, TransactionFailed) and isinstance(error.cause, NoNodeError):
                self._lost = True
                self.wake()
            elif isinstance(error, (SessionExpiredError, KazooException)):
                self._sent_external_id = self._saved_external_id  # written again in the next pass
                self.log.warning("Cannot write node %s: %r", node.id, error)

        try:
            self.zk.writer.submit(txn, written)
        except RuntimeError as error:
            self.log.warning("Cannot write node %s: %s", node.id, error)


class _LockLost(Exception):
    """Our lock on the node's record is lost."""


def copy_image(node: zk.Node, image: ImageAccess) -> None:
    """Copy how to log in from the configured image to the record."""
    node.username = image.username
    node.python_path = image.python_path
    node.shell_type = image.shell_type
    node.connection_port = image.connection_port
    node.connection_type = image.connection_type


def copy_instance(node: zk.Node, instance: Instance, pool: ConfigPool) -> None:
    """Copy what the cloud reports about the machine to the record."""
    for name in INSTANCE_FIELDS:
        setattr(node, name, getattr(instance, name, None))
    if node.node_properties is None:
        node.node_properties = {}
    node.interface_ip = getattr(instance, "interface_ip", None)
    if pool.use_internal_ip:
        private = getattr(instance, "private_ipv4", None) or getattr(instance, "private_ipv6", None)
        node.interface_ip = private or node.interface_ip
    for name in IMAGE_OVERRIDES:
        if hasattr(instance, name):
            setattr(node, name, getattr(instance, name))
    node.host_keys = node.host_keys or []
    if instance.node_attributes:
        node.attributes = {**instance.node_attributes, **(pool.node_attributes or {})}
    try:
        node.resources = dict(instance.getQuotaInformation().get_resources())
    except NotImplementedError:
        pass
