"""Replaces idle nodes that are outdated, and deletes those above ``min-ready`` (LAU-14).

Outdated are nodes that are older than the rotation that an operator has started, or than the build
of their image that is used now, with ``replace-idle``. Older means created by an earlier change of
ZooKeeper, so that clocks do not matter.

Several launchers together keep the stock of a label: before one of them deletes nodes it creates a
short-lived mark under the elections path, so that it sees what the others have deleted.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kazoo.exceptions import KazooException

from nodepool.base.problems import Problem
from nodepool.base.workqueue import Reconciler
from nodepool.config.model import Label
from nodepool.driver.quota.support import counts_labels
from nodepool.launcher.nodes.reconciler import NodeReconciler
from nodepool.launcher.state import LauncherState
from nodepool.status.causes import min_ready_of
from nodepool.status.drains import static_providers
from nodepool.zk import paths
from nodepool.zk.locks import add_unlocked_check
from nodepool.zk.locks.turn import TurnLock
from nodepool.zk.mirror import notes
from nodepool.zk.mirror.requests import MIN_READY
from nodepool.zk.records import DELETING, READY, REQUESTED, Node
from nodepool.zk.rotations import Rotation, remaining
from nodepool.zk.writer import TransactionFailed, Txn
from nodepool.zk.zookeeper import ZooKeeper

#: The image and the build of a node's ``image_id``.
_BUILD = re.compile(r"/nodepool/images/([^/]+)/builds/([^/]+)/")
#: The key of the check whether rotations have ended; labels are never empty.
END = ""
#: Seconds until that check; until a refused transaction is repeated; between two checks of a label
#: whose nodes are left.
PACE, RETRY, RESYNC = 0.2, 1.0, 30.0
#: Nodes that are deleted in one transaction.
MOST = 100
#: Seconds after which outdated nodes that cannot be replaced yet, or a rotation, are a problem.
STALLED, SLOW = 600.0, 3600.0
#: Seconds after which a surplus is deleted: launchers need time to apply and report a file, and
#: may lose their session.
LASTING = 60.0
#: Why a node is deleted that is not outdated.
SURPLUS = "more nodes of its label are ready than min-ready"


@dataclass(frozen=True)
class Idle:
    """A free node.

    :param outdated: why it is to be replaced; empty: it is not.
    :param surplus: it may be deleted if more of them are free than are kept.
    """

    node: Node
    outdated: str = ""
    surplus: bool = False


def choose(idle: Sequence[Idle], keep: int, unready: int) -> list[tuple[Node, str]]:
    """Return the nodes to delete now, and why.

    :param idle: all free nodes of a label, in the order of their deletion.
    :param unready: nodes that may be missing while outdated ones are replaced.
    """
    extra = sorted((each for each in idle if each.surplus), key=lambda each: not each.outdated)
    del extra[max(0, len(extra) - keep) :]
    most = max(0, len(idle) - len(extra) - max(0, keep - unready))
    outdated = [each for each in idle if each.outdated and each not in extra]
    return [(each.node, each.outdated or SURPLUS) for each in extra + outdated[:most]]


class RotationReconciler(Reconciler[str]):
    """Deletes nodes of one label at a time; ``min-ready`` launches others."""

    log = logging.getLogger("nodepool.RotationWorker")

    def __init__(self, state: LauncherState, nodes: NodeReconciler) -> None:
        super().__init__("CleanupWorker-rotation", self.reconcile, self.log)
        self.state, self.nodes = state, nodes
        self._rotating = False
        #: Labels with more nodes than our ``min-ready``, which may be kept for others.
        self._held: set[str] = set()
        #: Label -> since when (monotonic seconds) more nodes are ready than launchers keep.
        self._surplus: dict[str, float] = {}
        #: Label -> why its outdated nodes are left, and since when (monotonic seconds).
        self._waiting: dict[str, tuple[str, float]] = {}

    # -- events

    def attach(self, zk: ZooKeeper) -> None:
        """Listen to the mirror; must be called before the connection is established."""
        zk.node_tree.listeners.append(self._node_changed)
        zk.node_tree.lock_listeners.append(
            lambda node_id, locked: self._node_changed(
                node_id, None, None if locked else zk.node_tree.get(node_id)
            )
        )
        zk.request_tree.listeners.append(lambda *_: self._check(self._held))
        zk.component_tree.listeners.append(lambda *_: self._check(self._held))
        zk.report_tree.listeners.append(lambda: self._check({*self._held, END}))
        zk.note_tree.listeners.append(self.check_all)
        zk.image_tree.listeners.append(lambda _image: self.check_all())
        for tree in zk.trees:
            tree.sync_listeners.append(self.check_all)

    def check_all(self) -> None:
        zk = self.state.zk
        if zk is not None:
            self._rotating = bool(zk.note_tree.of(Rotation))
            self._check(label for label, count in list(zk.node_tree.counted.free.items()) if count)
            self.queue.add(END)

    def _check(self, labels: Iterable[str]) -> None:
        for label in tuple(labels):
            self.queue.add(label)

    def _node_changed(self, _node_id: str, old: Node | None, new: Node | None) -> None:
        node = new or old
        if node is not None and _is_free(old) != _is_free(new):
            self._check(node.type)
        if self._rotating:
            self.queue.add_later(END, PACE)

    # -- one label

    def reconcile(self, name: str) -> float | None:
        """Delete nodes of a label, or rotations that have ended; return when to check again."""
        zk = self.state.zk
        if self.state.config is None or not (zk.connected and zk.synced):
            return None  # everything is checked again after the synchronization
        if name == END:
            again = [self._end(each) for each in zk.note_tree.of(Rotation)]
            return PACE if any(again) else None
        label = self.state.config.labels.get(name) or Label()  # other launchers may have it
        label.name = name
        if not self._may_change(label):
            self._waiting.pop(name, None)
            self._held.discard(name)
            self._surplus.pop(name, None)
            return None
        chosen, why = self._plan(label)
        if chosen or not why:
            self._waiting.pop(name, None)
            try:
                if not chosen:
                    return LASTING if name in self._surplus else None
                return self._delete(label)
            except (KazooException, TimeoutError) as error:
                self.log.warning("Cannot delete idle nodes of label %s now: %r", name, error)
                return RETRY
        since = self._waiting.get(name, (why, self.state.clock.monotonic()))[1]
        self._waiting[name] = why, since
        return RESYNC

    def _may_change(self, label: Label) -> bool:
        """Return False if nothing is to be deleted; this does not check the nodes."""
        count = self.state.zk.node_tree.counted.free[label.name]
        shrinks = label.shrink_ready and label.sets_min_ready and count > max(0, label.min_ready)
        images = self.state.config.diskimages.values()
        return self._rotating or shrinks or any(image.replace_idle for image in images)

    def _plan(self, label: Label) -> tuple[list[tuple[Node, str]], str]:
        """Return the nodes to delete now, with the reasons, and why outdated ones are left."""
        zk, nodes = self.state.zk, self._free(label)
        keep = max(0, int(label.min_ready), min_ready_of(zk).get(label.name, 0))
        made = sum(node.requestor == MIN_READY for node in nodes)
        shrink = self._may_shrink(label, made, keep)
        managers = self.state.config.provider_managers.items()
        static = static_providers(zk) | {name for name, each in managers if counts_labels(each)}
        served = {pool.provider_name for pool in zk.getRegisteredPools()} - static
        idle = [
            Idle(node, self._outdated(node), shrink and node.requestor == MIN_READY)
            if node.provider in served
            else Idle(node)
            for node in nodes
        ]
        unready, outdated = label.max_unready.of(keep), any(each.outdated for each in idle)
        why = ""
        if made and not keep and not label.sets_min_ready:
            why = f"no running launcher reports min-ready of label {label.name}"
        elif keep and outdated:
            why = self._cannot_launch(label)
        if why:  # of no outdated node
            unready, keep = 0, max(keep, len(idle))
        chosen = choose(idle, keep, unready)
        if outdated and not why:
            why = f"{len(idle)} of {keep} nodes are ready, at least {keep - unready} have to be"
        return chosen, why if outdated else ""

    def _free(self, label: Label) -> list[Node]:
        """Return the nodes of a label that requests could get, oldest first."""
        tree = self.state.zk.node_tree
        with tree.lock:
            ids = [i for by_label in tree.free.values() for i in by_label.get(label.name, ())]
            nodes = [tree.nodes[i] for i in ids if not tree.is_changing(i)]
        nodes = [node for node in nodes if self.state.drains.of_node(node) is None]
        return sorted(nodes, key=lambda node: node.stat.czxid if node.stat is not None else 0)

    def _outdated(self, node: Node) -> str:
        """Return why the node is to be replaced; empty: it is not."""
        for rotation in self.state.zk.note_tree.of(Rotation):
            if rotation.replaces(node):
                return rotation.why
        found = _BUILD.match(node.image_id) if isinstance(node.image_id, str) else None
        image = self.state.config.diskimages.get(found[1]) if found is not None else None
        if found is None or image is None or not image.replace_idle:
            return ""
        upload = self.state.zk.image_tree.newest_ready(found[1], node.provider or "")
        if upload is None or upload.stat is None or node.stat is None:
            return ""
        # Nodes that were launched later have been launched with another build on purpose.
        if upload.build_id == found[2] or node.stat.czxid > upload.stat.mzxid:
            return ""
        return f"build {upload.build_id} of image {found[1]} is used now"

    def _may_shrink(self, label: Label, made: int, keep: int) -> bool:
        """Return whether nodes above ``min-ready`` may be deleted.

        No request may wait for nodes of the label, and all launchers that offer it must be known.
        """
        self._held.discard(label.name)
        if not (label.shrink_ready and label.sets_min_ready and made > max(0, label.min_ready)):
            return False
        self._held.add(label.name)  # first, so that no change is missed
        if made <= keep:
            self._surplus.pop(label.name, None)
            return False
        now = self.state.clock.monotonic()
        if now - self._surplus.setdefault(label.name, now) < LASTING:
            return False
        zk = self.state.zk
        known = {
            pool["id"]
            for report in zk.readReports()
            for provider in report["providers"].values()
            for pool in provider["pools"].values()
        }
        offering = [pool.id for pool in zk.getRegisteredPools() if label.name in pool.labels]
        with zk.request_tree.lock:
            requests = list(zk.request_tree.requests.values())
        return known.issuperset(offering) and not any(
            request.state == REQUESTED
            and label.name in request.node_types
            and request.requestor != MIN_READY
            for request in requests
        )

    def _cannot_launch(self, label: Label) -> str:
        """Return why none of our pools launches nodes of the label; empty: one does."""
        found = []
        for pool in label.pools:
            if pool.provider is not None:
                failing = self.state.launch_failures.blocked(pool.provider, [label.name])
                drain = self.state.drains.of_pool(pool, [label.name])
                why = f"{drain.name} is drained" if drain is not None else ""
                found.append(str(failing[1]) if failing is not None else why)
        return found[0] if found and all(found) else ""

    # -- changes

    def _delete(self, label: Label) -> float | None:
        """Delete nodes of the label; return the seconds until the next check."""
        zk = self.state.zk
        mark = TurnLock(zk.kazoo_client, self.state.identifier, "rotation", label.name)
        if not mark.take():
            mark.when_free(lambda: self.queue.add(label.name))
            return None
        with contextlib.ExitStack() as unless_deleted:
            unless_deleted.callback(mark.drop)
            mark.catch_up(zk.node_tree)
            chosen = self._plan(label)[0][:MOST]
            txn = Txn(zk.kazoo_client)
            for node, _why in chosen:
                changed, node_id = node.copy(), node.id or ""
                changed.state = DELETING
                exists = node_id in zk.node_tree.lock_dirs
                add_unlocked_check(txn, paths.node_lock(node_id), exists)
                path, data = paths.node(node_id), changed.serialize()
                txn.set(path, data, node.version, tree=zk.node_tree, record=changed)
            txn.delete(mark.path)
            try:
                zk.writer.run(txn)
            except TransactionFailed as error:
                self.log.debug("Idle nodes of label %s have changed: %s", label.name, error)
                return RETRY
            unless_deleted.pop_all()
        for node, why in chosen:
            self.nodes.announce("Deleting", node, why)
        return None

    def _end(self, rotation: Rotation) -> bool:
        """Delete a rotation that has nothing left to replace; return whether to check again."""
        zk = self.state.zk
        tree, version = zk.node_tree, zk.note_tree.version(rotation)
        with tree.lock:
            nodes = list(tree.nodes.values())
            # They may have been created before the rotation.
            unread = any(path.rpartition("/")[2] not in tree.nodes for path in tree.changing())
        if unread or version < 0:
            return True
        if not remaining(rotation, nodes, static_providers(zk)):
            try:
                if notes.remove(zk.kazoo_client, rotation, version):
                    self.log.info("The rotation of %s is complete", rotation.name)
            except (KazooException, TimeoutError) as error:
                # Also if an operator has started it again.
                self.log.debug("The rotation of %s is not deleted yet: %r", rotation.name, error)
                return True
        return False

    # -- problems

    def problems(self) -> list[Problem]:
        """Return the labels whose outdated nodes are not replaced, and rotations that take long."""
        now, zk = self.state.clock.monotonic(), self.state.zk
        slow = [
            each
            for each in (zk.note_tree.of(Rotation) if zk is not None else ())
            if self.state.clock.time() - each.since > SLOW
        ]
        return [
            Problem(
                f"the rotation of {each.name} has not ended within {SLOW / 60:.0f} min",
                help=f"see `nodepool rotate list`; `nodepool rotate cancel {each.name}` ends it",
            )
            for each in slow
        ] + [
            Problem(
                f"outdated idle nodes are not replaced: {why}",
                label=label,
                help=f"see `nodepool explain label {label}`",
            )
            for label, (why, since) in sorted(self._waiting.copy().items())
            if now - since > STALLED
        ]


def _is_free(node: Node | None) -> bool:
    return node is not None and node.state == READY and node.allocated_to is None
