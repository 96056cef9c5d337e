"""One thread per launch or delete, for drivers without state machines (DRV-6.1, DRV-6.2)."""

from __future__ import annotations

import abc
import logging
import threading
import time
from typing import Any

import kazoo.exceptions

from nodepool import exceptions
from nodepool.base.problems import log_failure
from nodepool.config.model import ProviderConfig
from nodepool.driver.provider import Provider
from nodepool.logconfig import get_annotated_logger
from nodepool.metrics.launches import StatsReporter
from nodepool.zk import paths
from nodepool.zk.locks import LockHandle
from nodepool.zk.writer import TransactionFailed, Txn
from nodepool.zk.zookeeper import ABORTED, DELETED, DELETING, FAILED, Node, ZooKeeper


class NodeLauncher(threading.Thread, StatsReporter, abc.ABC):
    """Runs ``launch`` in a separate thread and stores the result; the user starts it."""

    def __init__(self, handler: Any, node: Node, provider_config: ProviderConfig) -> None:
        threading.Thread.__init__(self, name=f"NodeLauncher-{node.id}")
        StatsReporter.__init__(self, handler.pw.nodepool.statsd)
        self.log = get_annotated_logger(
            logging.getLogger("nodepool.NodeLauncher"),
            event_id=handler.request.event_id,
            node_request_id=handler.request.id,
            node_id=node.id,
        )
        self.handler = handler
        self.zk = handler.zk
        self.node = node
        self.provider_config = provider_config

    @abc.abstractmethod
    def launch(self) -> None:
        """Create the node and store it READY; any exception is a failed launch."""

    def run(self) -> None:
        started = time.monotonic()
        statsd_key = "ready"
        try:
            self.launch()
        except kazoo.exceptions.SessionExpiredError:
            # Our lock ended with the session: another launcher may own the record now, nothing is
            # written.
            self.log.error("Lost the ZooKeeper session while launching node %s", self.node.id)
            self.node.state = FAILED
            statsd_key = "error.zksession"
        except exceptions.QuotaException:
            self.log.info("Aborting node %s due to quota failure", self.node.id)
            self._store(ABORTED)
            statsd_key = "error.quota"
        except Exception as error:
            self.log.exception("Launch failed for node %s:", self.node.id)
            self._store(FAILED)
            statsd_key = getattr(error, "statsd_key", "error.unknown")
        try:
            self.recordLaunchStats(statsd_key, int((time.monotonic() - started) * 1000))
        except Exception:
            self.log.exception("Unable to report launch stats:")

    def _store(self, state: str) -> None:
        self.node.state = state
        try:
            self.zk.storeNode(self.node)
        except Exception:
            self.log.exception("Unable to store node %s as %s:", self.node.id, state)


class NodeDeleter(threading.Thread):
    """Deletes a locked node in a separate thread; the user starts it."""

    log = logging.getLogger("nodepool.NodeDeleter")

    def __init__(self, zk: ZooKeeper, provider_manager: Provider, node: Node) -> None:
        threading.Thread.__init__(self, name=f"NodeDeleter for {node.provider} {node.external_id}")
        self._zk = zk
        self._provider_manager = provider_manager
        self._node = node

    @staticmethod
    def delete(zk_conn: ZooKeeper, manager: Provider, node: Node, node_exists: bool = True) -> None:
        """Delete the resource, then the record. After an error the node is unlocked for a retry.

        ``node_exists`` False: there is no record (for example a leaked resource).
        """
        log = get_annotated_logger(NodeDeleter.log, node_id=node.id)
        try:
            if (
                node.state != DELETING
            ):  # the launcher has written it before; state_time is the start of the deletion
                node.state = DELETING
                if node_exists:
                    zk_conn.storeNode(node)
            if node.external_id:
                manager.cleanupNode(node.external_id)
                manager.waitForNodeCleanup(node.external_id)
        except exceptions.NotFound:
            log.info(
                "The resource of node %s in provider %s no longer exists", node.id, node.provider
            )
        except Exception as error:
            log_failure(
                log, error, "Exception deleting node %s in provider %s", node.id, node.provider
            )
            if node_exists:
                zk_conn.unlockNode(node)
            return
        if node_exists:
            log.info("Deleting ZooKeeper record of node %s, state %s", node.id, node.state)
            NodeDeleter._remove(zk_conn, node)
        manager.nodeDeletedNotification(node)

    @staticmethod
    def _remove(zk_conn: ZooKeeper, node: Node) -> None:
        """Delete record and lock in one transaction, unless others wait for the lock."""
        if isinstance(node.lock, LockHandle):
            txn = Txn(zk_conn.kazoo_client)
            txn.delete(node.lock.path)
            txn.delete(node.lock.directory)
            txn.delete(paths.node(node.id or ""))
            try:
                zk_conn.writer.run(txn)
            except TransactionFailed:
                pass
            else:
                node.state, node.lock = DELETED, None
                return
        zk_conn.deleteNode(node)

    def run(self) -> None:
        try:  # a node without id stands for a resource without a record
            self.delete(
                self._zk, self._provider_manager, self._node, node_exists=self._node.id is not None
            )
        except Exception:
            self.log.exception("Unable to delete node %s:", self._node.id)
