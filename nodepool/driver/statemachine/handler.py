"""Request handler of state machine drivers (DRV-7.7)."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping

from nodepool.config.model import cloud_image, disk_image
from nodepool.driver.quota.amounts import QuotaInformation
from nodepool.driver.request.base import RequestHost
from nodepool.driver.request.handler import NodeRequestHandler
from nodepool.driver.statemachine.launcher import StateMachineNodeLauncher
from nodepool.driver.statemachine.loop import LoopEnded
from nodepool.driver.statemachine.stage import Serving
from nodepool.reasons import Code, Reason, because
from nodepool.zk import zookeeper as zk
from nodepool.zk.mirror.requests import VERIFIER
from nodepool.zk.rollback import upload_of, why_unused


class StateMachineHandler(NodeRequestHandler, Serving):
    """Launches through the provider's adapter; all nodes of a request share one zone."""

    BLOCKING = False
    RESERVES = True
    _choose = staticmethod(random.choice)

    def __init__(self, pw: RequestHost, request: zk.NodeRequest) -> None:
        super().__init__(pw, request)
        self.chosen_az: str | None = None
        self._az_known = False
        self.launchers: list[StateMachineNodeLauncher] = []
        self._prepared: dict[str, StateMachineNodeLauncher] = {}

    @property
    def alive_thread_count(self) -> int:
        return sum(1 for launcher in self.launchers if not launcher.complete)

    def imagesAvailable(self) -> bool:
        for name in set(self.request.node_types):
            label = self.pool.labels[name]
            if cloud_image(label) is not None:
                if not self.manager.labelReady(label):
                    return False
            elif disk_image(label) is not None:
                problems, image = self.manager.label_problems, label.diskimage.name
                if self.request.requestor == VERIFIER:
                    found = upload_of(self.zk.readImages(), self.request, image, self.provider.name)
                    return found is not None
                if not self.zk.getMostRecentImageUpload(image, self.provider.name, cached=True):
                    unused = why_unused(self.zk.readImages(), image, self.provider.name)
                    text = f"disk image {image} (option diskimage) " + (
                        f"is not used here: {unused}" if unused else "has not been uploaded here"
                    )
                    solved = functools.partial(self._changed, image, unused)
                    problems.note(name, "image", text, solved, "held image" if unused else None)
                    return False
                problems.clear(name, "image")
        return True

    def _changed(self, image: str, unused: str) -> bool:
        """Return whether the mirror shows a usable upload, or another reason why there is none."""
        tree, provider = self.zk.image_tree, self.provider.name
        return tree is not None and (
            tree.newest_ready(image, provider) is not None
            or why_unused(self.zk.readImages(), image, provider) != unused
        )

    # -- quota

    def _pool_limits(self) -> QuotaInformation:
        pool = self.pool
        limits = {
            **(pool.max_resources or {}),
            "cores": pool.max_cores,
            "instances": pool.max_servers,
            "ram": pool.max_ram,
        }
        if pool.max_volumes:
            limits["volumes"] = pool.max_volumes
        if pool.max_volume_gb:
            limits["volume-gb"] = pool.max_volume_gb
        return QuotaInformation(**limits, default=math.inf)

    def hasProviderQuota(self, node_types: list[str]) -> bool:
        problems = self.manager.label_problems
        self.exceeded = self._short(
            self.manager.quotaNeededByLabels(node_types, self.pool).get_resources(), used=False
        )
        for name in dict.fromkeys(node_types):
            short = self.exceeded and self._short(
                self.manager.quotaNeededByLabel(name, self.pool).get_resources(), used=False
            )
            if short:
                problems.note(
                    name, "quota", f"a node of it can never fit into the quota of {short}"
                )
            else:
                problems.clear(name, "quota")
        return self.exceeded is None

    def hasRemainingQuota(self, ntype: str) -> bool:
        needed = self.manager.quotaNeededByLabel(ntype, self.pool).get_resources()
        short = self._short(needed, used=True)
        if short is not None:
            # The figures include the node by now: they also show when there is quota again.
            self.manager.refusals.succeeded(ntype)
        elif self.manager.refusals.wait(ntype):
            name, sold_out = self.provider.name, self.manager.sold_out_offers()
            sold_out = f", sold out: {sold_out}" if sold_out else ""
            short = because(Code.REFUSED_BY_CLOUD, provider=name, label=ntype, sold_out=sold_out)
        self.shortage = short
        self.wants_more_of_provider = short is None or short.code is not Code.POOL_LIMIT
        return short is None

    def hasRoomFor(self, labels: list[str]) -> bool:
        needed = self.manager.quotaNeededByLabels(labels, self.pool).get_resources()
        return self._short(needed, used=True) is None and not any(
            map(self.manager.refusals.wait, labels)
        )

    def _short(self, needed: Mapping[str, float], used: bool) -> Reason | None:
        manager = self.manager
        if not self.pool.ignore_provider_quota:
            parts = manager._usage_parts() if used else []
            short = manager.short_of_limits(needed, parts, launch=used)
            if short is not None:
                return because(Code.PROVIDER_QUOTA, provider=self.provider.name, **short._asdict())
        parts = manager._usage_parts(self.pool) if used else []
        short = manager.fits(needed, self._pool_limits(), parts)
        return (
            None
            if short is None
            else because(Code.POOL_LIMIT, name=self.pool.name, **short._asdict())
        )

    # -- zones

    def checkReusableNode(self, node: zk.Node) -> bool:
        return not (self._az_known and self.chosen_az and node.az and node.az != self.chosen_az)

    def noteReuse(self, node: zk.Node) -> None:
        if not self._az_known and node.az:
            self.chosen_az = node.az
            self._az_known = True

    def setNodeMetadata(self, node: zk.Node) -> None:
        if not self._az_known:
            zones = self.pool.azs or self.manager.adapter.getAZs()
            self.chosen_az = self._choose(list(zones)) if zones else None
            self._az_known = True
        node.az = self.chosen_az
        node.resources = dict(
            self.manager.quotaNeededByLabel(node.type[0], self.pool).get_resources()
        )

    # -- launching

    def prepareNode(self, node: zk.Node) -> None:
        launcher = StateMachineNodeLauncher(self, node, self.provider)
        launcher.prepare()
        self._prepared[node.id or ""] = launcher

    def launch(self, node: zk.Node) -> None:
        launcher = self._prepared.pop(node.id or "", None) or StateMachineNodeLauncher(
            self, node, self.provider
        )
        # A request that waits for quota may retry many times.
        self.launchers = [*(each for each in self.launchers if not each.complete), launcher]
        try:
            launcher.launch()
        except LoopEnded:
            # Its provider was replaced by a reload since the node was planned.
            self.refresh()
            self.launchers[-1] = launcher = StateMachineNodeLauncher(self, node, self.provider)
            launcher.launch()

    def launchesDropped(self) -> None:
        for launcher in self.launchers:
            launcher.lock_lost()

    def launchesComplete(self) -> bool:
        return all(launcher.complete for launcher in self.launchers)
