"""Launches one node, from its record to ready: attempts, timeouts, scan (DRV-7.7, LAU-9)."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from typing import Any, TypeAlias, TypeVar

from kazoo.exceptions import KazooException, NoNodeError, SessionExpiredError

from nodepool import exceptions, metrics
from nodepool.access import audit
from nodepool.access.identity import Identity, Role
from nodepool.base import hostnames
from nodepool.base.backoff import Backoff
from nodepool.base.problems import log_failure, one_line
from nodepool.cloud import CallsStopped
from nodepool.config.model import ProviderConfig, disk_image
from nodepool.driver.statemachine.loop import Pace
from nodepool.driver.statemachine.model import ExternalId, Instance, StateMachine
from nodepool.driver.statemachine.node_fields import copy_image, copy_instance
from nodepool.driver.statemachine.stage import Serving
from nodepool.driver.statemachine.upload_trials import blames_image, trial_options
from nodepool.logconfig import Log, get_annotated_logger
from nodepool.metrics import tracing
from nodepool.metrics.launches import StatsReporter
from nodepool.nodescan import NodescanRequest
from nodepool.zk import zookeeper as zk
from nodepool.zk.cluster import CLUSTER_ID, NODE_CREATED
from nodepool.zk.locks import LockHandle
from nodepool.zk.mirror.requests import VERIFIER
from nodepool.zk.rollback import RollbackRefused, rolled_back, upload_of, upload_path
from nodepool.zk.writer import TransactionFailed, Txn

#: Lines and characters of the end of a console that are stored in the node's history.
CONSOLE_LINES, CONSOLE_LENGTH = 50, 4000
#: Seconds after which an orphan that cannot be deleted is left to the leak cleanup.
DELETE_LIMIT = 600.0
#: Pauses after failed deletions.
DELETE_BACKOFF = Backoff(0.1, 10.0)
#: Refusals of one offer while others are available that use up no attempt.
MOST_REFUSED = 30

T = TypeVar("T")
#: Yields the seconds until the next pass at most.
Passes: TypeAlias = Generator[float, None, T]


class StateMachineNodeLauncher(StatsReporter):
    """Runs on the provider's create loop; ``complete`` once the node's state is final."""

    def __init__(self, handler: Serving, node: zk.Node, provider_config: ProviderConfig) -> None:
        super().__init__(handler.pw.nodepool.statsd)
        self.handler = handler
        self.node = node
        self.provider_config = provider_config
        self.zk = handler.zk
        self.manager = handler.manager
        self._failures = handler.pw.nodepool.launch_failures
        self.log: Log = get_annotated_logger(
            logging.getLogger(f"nodepool.StateMachineNodeLauncher.{provider_config.name}"),
            event_id=handler.request.event_id,
            node_request_id=handler.request.id,
            node_id=node.id,
        )
        self.attempts = 1
        self.retries: int = provider_config.launch_retries
        self._refused_offers = 0
        self.state_machine: StateMachine | None = None
        self.delete_state_machine: StateMachine | None = None
        self.nodescan_request: NodescanRequest | None = None
        self.start_time = self.manager.clock.monotonic()
        self.launch_start_time = self.start_time
        self._prepared = False
        self._image_external_id: object = None
        #: The upload that the present attempt uses, unless it verifies one.
        self._upload: zk.ImageUpload | None = None
        #: It tries an upload: what happens says nothing about the label.
        self._verifies = handler.request.requestor == VERIFIER
        #: The attempt failed because of an upload that is replaced now.
        self._blameless = False
        self._pace = Pace(self.wake)
        #: The stored record, and the last one that was sent.
        self._saved_external_id: object = node.external_id
        self._sent_external_id: object = node.external_id
        #: The lock on the record is lost; detected in the next pass.
        self._lost = False
        #: The record is not ours any more, and does not contain what is being deleted here.
        self._orphaned = False
        #: Why the launch is stalled, as last logged.
        self._trouble: str | None = None
        self._passes = self._serve()

    def __repr__(self) -> str:
        return f"launch of node {self.node.id} (attempt {self.attempts})"

    @property
    def complete(self) -> bool:
        return self.node.state != zk.BUILDING and not self._orphaned

    @property
    def label(self) -> Any:
        return self.handler.pool.labels[self.node.type[0]]

    # -- start of an attempt

    def prepare(self) -> None:
        """Fill the node, for the caller to write; after an error the first pass tries again."""
        with contextlib.suppress(*exceptions.FOREIGN):
            self._fill_from_image()
            self._prepared = True

    def _fill_from_image(self) -> None:
        label, node = self.label, self.node
        self._upload = None
        if disk_image(label) is not None:
            name = label.diskimage.name
            provider = self.provider_config.name
            upload = (
                upload_of(self.zk.readImages(), self.handler.request, name, provider)
                if self._verifies
                else self.zk.getMostRecentImageUpload(name, provider, cached=True)
            )
            if upload is None:
                raise exceptions.LaunchNodepoolException(
                    f"Unable to find current cloud image {name} in {provider}"
                )
            if not self._verifies:
                upload = self._upload = self.manager.upload_trials.choose(
                    self.zk, upload, trial_options(label)[1], self, self.attempts == 1
                )
            image = self.provider_config.diskimages[name]
            self._image_external_id = upload.external_id
            node.image_id = upload_path(upload)
        else:
            image = label.cloud_image
            self._image_external_id = None
            node.image_id = image.name
        copy_image(node, image)
        node.resources = dict(
            self.manager.quotaNeededByLabel(node.type[0], self.handler.pool).get_resources()
        )
        planned = self.manager.adapter.plannedExternalId(label, node.id or "")
        if planned is not None:
            # Written with the rest, by the caller.
            node.external_id = self._saved_external_id = self._sent_external_id = planned

    def launch(self) -> None:
        """Start the launch.

        :raises LoopEnded: the provider accepts no new work any more.
        """
        self.manager.create_loop.add(self)

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
            self._fill_from_image()
            self._save_later()  # an unavailable ZooKeeper is not a failed attempt
        node = self.node
        self.start_time = self.manager.clock.monotonic()
        metadata = {
            "nodepool_node_id": node.id or "",
            "nodepool_pool_name": self.handler.pool.name,
            "nodepool_provider_name": self.provider_config.name,
            **self._marks(),
        }
        self.log.info(
            "Creating server with hostname np%s for %s (attempt %s of %s)",
            node.id,
            node.type[0],
            self.attempts,
            self.retries,
        )
        self._note("node-step", step=f"attempt {self.attempts} of {self.retries}: server requested")
        machine = self.manager.adapter.getCreateStateMachine(
            f"np{node.id}",
            self.label,
            self._image_external_id,
            metadata,
            self.handler.request,
            node.az,
            self.log,
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
        try:
            return next(self._passes)
        except StopIteration:
            return None
        except exceptions.FOREIGN:
            if self.node.state == zk.BUILDING:
                self._end(zk.FAILED, "error.unknown", save=True)
            raise

    def _serve(self) -> Passes[None]:
        """Launch the node, until it is ready or given up."""
        try:
            yield from self._make_attempts()
        except (SessionExpiredError, _LockLost):
            yield from self._lose()
        except exceptions.QuotaException:
            self.log.info("Aborting node %s due to quota failure", self.node.id)
            self.manager.invalidateQuotaCache()
            self.manager.refusals.failed(self.node.type[0], together=True)
            self.node.external_id = self._external_id()
            self._end(zk.ABORTED, "error.quota", save=True)

    def _make_attempts(self) -> Passes[None]:
        """Make attempts until one succeeds; each first deletes the remains of the last one."""
        remains: ExternalId = None
        while True:
            try:
                if remains is not None:
                    yield from self._remove(remains)
                yield from self._start_machine()
                instance = yield from self._create()
                yield from self._scan(instance)
                break
            except (SessionExpiredError, _LockLost, exceptions.QuotaException):
                raise
            except exceptions.FOREIGN as error:
                yield from self._report_failure(error)
                stopped = self._count_failure(error)
                if isinstance(error, exceptions.OfferRefusedException):
                    self._refused_offers += 1
                    self.retries += self._refused_offers <= MOST_REFUSED
            self.node.external_id = remains = self._external_id()
            self._abandon_machine()
            if stopped or self.attempts >= self.retries:
                # Also store that nothing was created after all: an object with the planned name may
                # belong to others.
                self._end(
                    zk.FAILED, None, save=remains is not None or self._sent_external_id is not None
                )
                return
            self.attempts += 1
            self.state_machine, self._prepared = None, False
            self.start_time = self.manager.clock.monotonic()
        self.log.info("Node %s is ready", self.node.id)
        self.manager.label_problems.clear(self.node.type[0], "launch")
        self.manager.refusals.succeeded(self.node.type[0])
        if self._upload is not None:
            self.manager.upload_trials.started(self._upload)
        if not self._verifies:
            self._failures.succeeded(self.provider_config, self.node.type[0])
        self._end(zk.READY, "ready", save=True)

    def _pause(self, seconds: float) -> Passes[None]:
        """Wait for the next pass; raise if the lock on the record is lost."""
        yield seconds
        if self._lost and not self._orphaned:
            raise _LockLost

    def _left(self) -> float:
        """Return the seconds until the next pass at most.

        :raises ServerCreateTimeoutException: the attempt takes too long.
        """
        left: float = (self.provider_config.launch_timeout or 3600) - (
            self.manager.clock.monotonic() - self.start_time
        )
        if left <= 0:
            raise exceptions.ServerCreateTimeoutException("Timeout waiting for instance creation")
        return min(float(self.manager.MAXIMUM_SLEEP), left)

    def _elsewhere(self, function: Callable[[], None]) -> Passes[None]:
        """Run what may block on a start thread: the loop must not wait."""
        future = self.manager.start_executor(function)
        future.add_done_callback(lambda _future: self.wake())
        while not future.done():
            yield from self._pause(float(self.manager.MAXIMUM_SLEEP))
        future.result()

    def _start_machine(self) -> Passes[None]:
        """Create the create machine: the adapter may query the cloud."""
        if self._lost:
            raise _LockLost
        if self.attempts == 1 and self.manager.starts_quickly:
            self._timed_start()
        else:
            yield from self._elsewhere(self._timed_start)

    def _create(self) -> Passes[Instance]:
        """Advance the create machine until the machine runs."""
        machine = self.state_machine
        assert machine is not None
        while True:
            instance: Instance | None
            instance, pause = self._pace.advance(machine, self._left())
            if machine.complete and instance is not None:
                return instance
            self._report_trouble(machine.trouble)
            if machine.external_id != self._sent_external_id:
                self.node.external_id = machine.external_id
                self._save_later()
            yield from self._pause(pause)

    def _scan(self, instance: Instance) -> Passes[None]:
        """Store the data of the running machine, then read its keys."""
        self._note("node-step", step="server is running; reading its host keys")
        self._step_ended("create", self.start_time)
        runs_since = self.manager.clock.monotonic()
        copy_instance(self.node, instance, self.handler.pool)
        boot_timeout = self.provider_config.boot_timeout or 60
        request = NodescanRequest(
            self.node,
            self.label.host_key_checking,
            boot_timeout,
            self.log,
            on_complete=lambda _request: self.wake(),
        )
        self.nodescan_request = request
        self.manager.nodescan_worker.addRequest(request)
        if not request.complete:
            # After a crash the machine can be reached and deleted with this record.
            self._save_later()
        while not request.complete:
            yield from self._pause(self._left())
        keys = request.result()
        if keys:
            self.node.host_keys = keys
        self._step_ended("scan", runs_since)

    def _remove(self, external_id: ExternalId) -> Passes[None]:
        """Delete the remains of a failed attempt, with growing pauses after errors.

        An orphan is tried only for a while, as its provider may have to end.
        """
        failures, began, self.delete_state_machine = 0, self.manager.clock.monotonic(), None
        while True:
            try:
                machine = self.delete_state_machine
                if machine is None:
                    machine = self.delete_state_machine = (
                        self.manager.adapter.getDeleteStateMachine(external_id, self.log)
                    )
                    machine.wake = self.wake
                _nothing, wait = self._pace.advance(machine, float(self.manager.MAXIMUM_SLEEP))
                if machine.complete:
                    break
            except exceptions.NotFound:
                break
            except exceptions.FOREIGN as error:
                self.delete_state_machine = None
                if self._orphaned and self.manager.clock.monotonic() - began > DELETE_LIMIT:
                    self.log.error(
                        "Cannot delete %s, leaving it to the leak cleanup: %s", external_id, error
                    )
                    return
                log_failure(
                    self.log,
                    error,
                    "Error deleting %s after a failed launch; retrying",
                    external_id,
                )
                failures += 1
                wait = DELETE_BACKOFF.pause(failures)
            yield from self._pause(wait if self._orphaned else min(wait, self._left()))
        self.delete_state_machine = self.node.external_id = None
        self._saved_external_id = self._sent_external_id = None

    def _report_trouble(self, trouble: str | None) -> None:
        if trouble is not None and trouble != self._trouble:
            self.log.warning("Launch of node %s is stalled: %s", self.node.id, trouble)
            self.manager.label_problems.note(self.node.type[0], "launch", trouble)
        self._trouble = trouble

    def _external_id(self) -> Any:
        return (
            self.state_machine.external_id
            if self.state_machine is not None
            else self.node.external_id
        )

    def _step_ended(self, step: str, began: float) -> None:
        if self._statsd is not None:
            took = self.manager.clock.monotonic() - began
            self._statsd.timing(metrics.LAUNCH_STEP(self.provider_config.name, step), took * 1000)

    def _note(self, kind: str, **fields: object) -> None:
        """Add an event to the node's history, if the facade publishes events."""
        if tracing.current() is not None:
            self.trace_steps.append(
                (time.time(), str(fields.get("step") or fields.get("reason") or kind))
            )
        node, feed = self.node, self.zk.feed
        if feed is not None:
            feed.note(
                kind,
                node=node.id,
                request=self.handler.request.id,
                provider=node.provider,
                pool=node.pool,
                **fields,
            )

    # -- failures

    def _report_failure(self, error: BaseException) -> Passes[None]:
        if isinstance(error, (exceptions.TimeoutException, exceptions.LaunchKeyscanException)):
            self.log.warning("Launch attempt %s/%s failed: %s", self.attempts, self.retries, error)
        else:
            log_failure(self.log, error, "Launch attempt %s/%s failed", self.attempts, self.retries)
        self._note(
            "launch-failed", attempt=self.attempts, reason=one_line(str(error) or repr(error))
        )
        self._record(getattr(error, "statsd_key", "error.unknown"))
        if not isinstance(error, (KazooException, CallsStopped)):
            remedy = "scan" if self.nodescan_request is not None else None
            self.manager.label_problems.note(self.node.type[0], "launch", error, remedy=remedy)
        scan, self.nodescan_request = self.nodescan_request, None
        self.manager.nodescan_worker.removeRequest(scan)
        with contextlib.suppress(RuntimeError, CancelledError):  # the provider has stopped
            if scan is not None:
                yield from self._elsewhere(self._scan_failed)
            yield from self._doubt_upload(error)

    def _doubt_upload(self, error: BaseException) -> Passes[None]:
        """Return to the previous upload if the machines of this one do not start (BLD-23).

        A launch without further attempts gets one more if the upload was replaced.
        """
        upload, most = self._upload, trial_options(self.label)[0]
        if (
            upload is None
            or not most
            or self._external_id() is None
            or not blames_image(error)
            or not self.manager.upload_trials.failed(upload, most)
        ):
            return
        yield from self._elsewhere(lambda: self._roll_back(upload, error))

    def _roll_back(self, upload: zk.ImageUpload, error: BaseException) -> None:
        image, provider = upload.image_name or "", upload.provider_name or ""
        try:
            done = self.manager.upload_trials.roll_back(self.zk, upload, error)
        except (RollbackRefused, KazooException, TimeoutError) as problem:
            self.log.warning("Image %s of %s is not rolled back: %s", image, provider, problem)
            return
        replaced = [upload_path(each.replaced) for each in rolled_back(self.zk.readImages())]
        if upload_path(upload) in replaced:
            self.retries = max(self.retries, self.attempts + 1)
            # The failures are those of the replaced upload.
            self._blameless = True
            self._failures.succeeded(self.provider_config, self.node.type[0])
        if done is None:
            return
        self.log.warning("%s", done)
        host, feed = hostnames.short(), self.zk.feed
        identity = Identity(f"launcher {host}", "launcher", Role.ADMIN)
        note = None if feed is None else feed.note
        audit.record(note, identity, host, "image-rollback", f"image {image}", "ok")

    def _count_failure(self, error: BaseException) -> bool:
        """Count the failure of a machine; return whether to give up.

        A creation that the cloud refuses, or does not answer, has cost no machine.
        """
        blameless, self._blameless = self._blameless or self._verifies, False
        others = (
            KazooException,
            CallsStopped,
            exceptions.CapacityException,
            exceptions.OfferRefusedException,
        )
        if blameless or isinstance(error, others) or self._external_id() is None:
            return False
        text = one_line(str(error) or repr(error))
        return self._failures.failed(self.provider_config, self.node.type[0], text)

    def _abandon_machine(self) -> None:
        """Abandon the machine: it removes what a call in progress may still create."""
        if self.state_machine is not None:
            try:
                self.state_machine.abandon()
            except Exception:
                self.log.exception("Error giving up the launch of node %s:", self.node.id)

    def _scan_failed(self) -> None:
        """Report keys that could not be read to the adapter, and log the console."""
        adapter, label, external_id = self.manager.adapter, self.label, self.node.external_id
        try:
            adapter.notifyNodescanFailure(label, external_id)
        except exceptions.FOREIGN:
            self.log.exception("Unable to report the scan failure of %s:", external_id)
        try:
            console = adapter.getConsoleLog(label, external_id)
        except NotImplementedError:
            return
        except exceptions.FOREIGN:
            self.log.exception("Unable to get the console log of %s:", external_id)
            return
        lines = (console or "").splitlines()
        for line in lines:
            self.log.info("Console log from hostname np%s: %s", self.node.id, line)
        if lines:
            self._note(
                "console-log",
                tail="\n".join(one_line(line) for line in lines[-CONSOLE_LINES:])[-CONSOLE_LENGTH:],
            )

    def lock_lost(self) -> None:
        """Record, from any thread, that the record belongs to another launcher now."""
        self._lost = True
        self.wake()

    def _lose(self) -> Passes[None]:
        """Stop without writing after losing the lock; remove what the record does not contain."""
        self.log.warning("Lost the lock of node %s; giving up the launch", self.node.id)
        external_id = self._external_id()
        self._abandon_machine()
        self.manager.nodescan_worker.removeRequest(self.nodescan_request)
        self._orphaned = external_id is not None and external_id != self._saved_external_id
        self._end(zk.FAILED, "error.zksession", save=False)
        if self._orphaned:
            yield from self._remove(external_id)
            self._orphaned = False
            self.handler.pw.progress(self.handler)  # its request has waited for this

    def _end(self, state: str, key: str | None, save: bool) -> None:
        """End the launch; the handler writes node and request together when it can."""
        node = self.node
        if self._upload is not None:
            self.manager.upload_trials.ended(self, self._upload)
        if state == zk.FAILED and save:
            self._save_later()
        if state in (zk.READY, zk.ABORTED):
            # Before the state: the pool may check at any moment, because another node of the
            # request has ended.
            node.unsaved = True
        node.state = state
        if key is not None:
            self._record(key)
        if state == zk.ABORTED or (state == zk.READY and not self.handler.launchesComplete()):
            self._save_later()
        self.handler.pw.progress(self.handler)

    def _record(self, key: str) -> None:
        try:
            self.recordLaunchStats(
                key, int((self.manager.clock.monotonic() - self.launch_start_time) * 1000)
            )
        except Exception:
            self.log.exception("Unable to report launch stats:")

    # -- writing

    def _save_later(self) -> None:
        """Write the record without waiting, as long as our lock stands."""
        node = self.node
        if not isinstance(node.lock, LockHandle):
            return
        txn = Txn(self.zk.kazoo_client)
        txn.check(node.lock.path)
        record = node.copy()
        txn.set(
            f"{self.zk._nodePath(node.id or '')}",
            record.serialize(),
            tree=self.zk.node_tree,
            record=record,
        )
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
