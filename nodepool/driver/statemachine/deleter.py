"""Deletes one node, from state ``deleting`` to the end (DRV-7.7, LAU-10)."""

from __future__ import annotations

import logging
import threading
from typing import Any

from kazoo.exceptions import KazooException

from nodepool import exceptions
from nodepool.base.problems import DELETION, log_failure
from nodepool.cloud import CallsStopped
from nodepool.driver.statemachine.loop import Pace
from nodepool.driver.statemachine.model import StateMachine
from nodepool.driver.statemachine.stage import LaunchProvider
from nodepool.logconfig import Log, get_annotated_logger
from nodepool.zk import paths
from nodepool.zk import zookeeper as zk
from nodepool.zk.locks import LockHandle
from nodepool.zk.writer import TransactionFailed, Txn
from nodepool.zk.zookeeper import ZooKeeper


class StateMachineNodeDeleter:
    """Runs on the provider's delete loop; the node is locked by the caller."""

    #: Seconds after which the deletion is abandoned for now.
    DELETE_TIMEOUT = 600

    def __init__(self, zk_conn: ZooKeeper, provider_manager: LaunchProvider, node: zk.Node) -> None:
        self.zk = zk_conn
        self.manager = provider_manager
        self.node = node
        self.log: Log = get_annotated_logger(
            logging.getLogger(f"nodepool.StateMachineNodeDeleter.{provider_manager.provider.name}"),
            node_id=node.id,
        )
        self.start_time = self.manager.clock.monotonic()
        self.state_machine: StateMachine | None = None
        self._pace = Pace(self.wake)
        self._ended = threading.Event()

    def __repr__(self) -> str:
        return f"deletion of node {self.node.id}"

    @property
    def complete(self) -> bool:
        return self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the deletion has ended, successfully or not."""
        self._ended.wait(timeout)

    def wake(self) -> None:
        self.manager.delete_loop.wake(self)

    def run_pass(self) -> float | None:
        if self._ended.is_set():
            return None
        node = self.node
        try:
            if node.state != zk.DELETING:
                node.state = zk.DELETING
                self.zk.storeNode(node)
            if not node.external_id:
                self._remove()
                return None
            if self.state_machine is None:
                self.state_machine = self.manager.adapter.getDeleteStateMachine(
                    node.external_id, self.log
                )
                self.state_machine.wake = self.wake
            _nothing, pause = self._pace.advance(
                self.state_machine, float(self.manager.MAXIMUM_SLEEP)
            )
            if self.state_machine.complete:
                self._remove()
                return None
            if self.manager.clock.monotonic() - self.start_time > self.DELETE_TIMEOUT:
                raise exceptions.ServerDeleteTimeoutException(
                    f"Timeout of {self.DELETE_TIMEOUT} s deleting {node.external_id}"
                )
            return pause
        except exceptions.NotFound:
            self.log.info("Instance %s not found in provider %s", node.external_id, node.provider)
            self._remove()
        except exceptions.FOREIGN as error:
            self._report(error)
            self._give_up()
        return None

    def _report(self, error: BaseException) -> None:
        node = self.node
        if isinstance(error, exceptions.TimeoutException):
            self.log.warning(
                "Cannot delete node %s in provider %s: %s", node.id, node.provider, error
            )
        else:
            log_failure(
                self.log, error, "Exception deleting node %s in provider %s", node.id, node.provider
            )
        if not isinstance(error, (KazooException, CallsStopped)):
            for label in node.type[:1]:
                self.manager.label_problems.note(
                    label, "deletion", f"{DELETION}{node.id} failed: {str(error) or repr(error)}"
                )

    def _give_up(self) -> None:
        """Unlock the node; the deletion is tried again later."""
        self.zk.unlock_soon(self.node)
        self._ended.set()

    def _remove(self) -> None:
        """Remove the record, its lock included, in one go."""
        node = self.node
        if not isinstance(node.lock, LockHandle):
            self._remove_carefully()
            return
        txn = Txn(self.zk.kazoo_client)
        txn.delete(node.lock.path)
        txn.delete(paths.node_lock(node.id or ""))
        txn.delete(paths.node(node.id or ""))
        self.zk.writer.submit(txn, self._removed)

    def _removed(self, _results: list[Any] | None, error: BaseException | None) -> None:
        if error is None:
            self.node.lock = None
            self._deleted()
        elif isinstance(error, TransactionFailed):
            # Others wait for the lock, or the record has vanished: use the robust method, off the
            # event thread.
            try:
                self.manager.start_executor(self._remove_carefully)
            except RuntimeError:
                # the provider has stopped; the next launcher that runs it finds the record
                self._give_up()
        else:
            self.log.warning("Cannot remove node %s: %r; retrying", self.node.id, error)
            self._give_up()

    def _remove_carefully(self) -> None:
        try:
            self.zk.deleteNode(self.node)
        except Exception:
            self.log.exception("Cannot remove node %s; retrying:", self.node.id)
            self._give_up()
        else:
            self._deleted()

    def _deleted(self) -> None:
        self.log.info("Deleted node %s of provider %s", self.node.id, self.node.provider)
        for label in self.node.type[:1]:
            self.manager.label_problems.clear(label, "deletion")
        try:
            self.manager.nodeDeletedNotification(self.node)
        except Exception:
            self.log.exception("Error after deleting node %s:", self.node.id)
        self._ended.set()
