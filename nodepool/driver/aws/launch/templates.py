"""Launch templates of fleet labels: created on demand, removed when unused (AWS-2.4)."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from nodepool.cloud import CallsStopped, CallTimeout
from nodepool.driver.aws.api.errors import code_of
from nodepool.driver.aws.config import AwsLabel, AwsProviderConfig
from nodepool.driver.aws.launch import parameters
from nodepool.driver.aws.objects import tag_dict_to_list, tag_list_to_dict

EXISTS = "InvalidLaunchTemplateName.AlreadyExistsException"
LOCK_WAIT = 300.0
"""Seconds to wait for another thread that creates or removes templates: the limit of a changing
call.
"""


class _Group:
    """The running adapters of one provider: an old one stays until its launches have ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.members: weakref.WeakSet[LaunchTemplates] = weakref.WeakSet()


_groups: dict[tuple[str, str | None, str | None], _Group] = {}
_groups_lock = threading.Lock()


def _group(provider: AwsProviderConfig) -> _Group:
    with _groups_lock:
        return _groups.setdefault(
            (provider.name, provider.region_name, provider.profile_name), _Group()
        )


class LaunchTemplates:
    """Launch templates of one adapter; ``ensure`` may be called repeatedly.

    Templates of a previous configuration are removed once per configuration: at its start, and when
    the last launch by the previous one has ended. A launch that finds its template missing creates
    it again and removes nothing, so that two launchers with different configurations, of which one
    is reloaded first, do not undo each other's work.
    """

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self.log = adapter.log
        self._group = _group(adapter.provider)
        self._there: set[str] = set()
        self._names: dict[tuple[str, str], str] = {}
        self._wanted: dict[str, dict[str, Any]] = {}
        for pool in adapter.provider.pools.values():
            for label in pool.labels.values():
                if label.fleet:
                    data = parameters.template_data(label)
                    name = parameters.template_name(data)
                    self._wanted[name] = data
                    self._names[(pool.name, label.name)] = name

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock. Raises CallTimeout: another thread waits for AWS too long."""
        lock = self._group.lock
        if not lock.acquire(timeout=LOCK_WAIT):
            raise CallTimeout(
                f"launch templates are still being created by another thread after {LOCK_WAIT:.0f} "
                "s"
            )
        try:
            yield
        finally:
            lock.release()

    # -- life of the adapter

    def start(self) -> None:
        """Register our labels: templates that they need are not removed from now on."""
        with _groups_lock:
            self._group.members.add(self)

    def stop(self) -> None:
        """Unregister after our last launch: our successor removes templates that only we used."""
        with _groups_lock:
            if self not in self._group.members:
                return
            self._group.members.discard(self)
            others = list(self._group.members)
        if self.wanted and others:
            successor = others[0]
            successor.adapter.calls.run(successor._clean, lane="write")

    def _clean(self) -> None:
        try:
            with self._locked():
                self._remove_unwanted(self._list())
        except CallsStopped:
            pass  # the next start finds them
        except Exception as error:
            self.log.warning(
                "Cannot remove launch templates of the former configuration: %s", error
            )

    # -- for launches

    @property
    def wanted(self) -> bool:
        """Whether any label uses a fleet; otherwise nothing is done."""
        return bool(self._wanted)

    def name(self, label: AwsLabel) -> str:
        """Return the label's template, creating it now if that has failed so far."""
        name = self._names[(label.pool.name, label.name)]
        if name not in self._there:
            self.ensure()
        return name

    def forget(self, name: str) -> None:
        """Record that the template no longer exists: :meth:`name` creates it again."""
        with self._locked():
            self._there.discard(name)

    def ensure(self, clean: bool = False) -> None:
        """Create missing templates; with ``clean`` remove those of a previous configuration.

        :raises CallTimeout: another thread creates them for too long.
        """
        if not self.wanted:
            return
        with self._locked():
            if self._there == set(self._wanted):
                return
            existing = self._list()
            for name, data in self._wanted.items():
                if name not in existing:
                    self._create(name, data)
                self._there.add(name)
            if clean:
                self._remove_unwanted(existing)

    # -- with the lock held

    def _list(self) -> dict[str, dict[str, Any]]:
        found = self.adapter.cloud.paged(
            "describe_launch_templates",
            "LaunchTemplates",
            Filters=[
                {
                    "Name": "launch-template-name",
                    "Values": [f"{parameters.LAUNCH_TEMPLATE_PREFIX}-*"],
                }
            ],
        )
        return {each["LaunchTemplateName"]: each for each in found}

    def _remove_unwanted(self, existing: dict[str, dict[str, Any]]) -> None:
        with _groups_lock:
            needed = {name for member in self._group.members for name in member._wanted}
        for name, template in existing.items():
            if name not in needed and self._is_ours(template):
                self._delete(name, template)

    def _create(self, name: str, data: dict[str, Any]) -> None:
        tags = {"nodepool_managed": "True", "nodepool_provider_name": self.adapter.provider.name}
        self.log.debug("Creating launch template %s", name)
        try:
            self.adapter.ec2(
                "create_launch_template",
                lane="write",
                idempotent=True,
                LaunchTemplateName=name,
                LaunchTemplateData=data,
                TagSpecifications=[
                    {"ResourceType": "launch-template", "Tags": tag_dict_to_list(tags)}
                ],
            )
        except Exception as error:
            if code_of(error) != EXISTS:
                raise

    def _is_ours(self, template: dict[str, Any]) -> bool:
        tags = tag_list_to_dict(template.get("Tags"))
        return (
            tags.get("nodepool_managed") == "True"
            and tags.get("nodepool_provider_name") == self.adapter.provider.name
        )

    def _delete(self, name: str, template: dict[str, Any]) -> None:
        self.log.info("Deleting launch template %s, which no label needs any more", name)
        try:
            self.adapter.ec2(
                "delete_launch_template",
                lane="delete",
                LaunchTemplateId=template["LaunchTemplateId"],
            )
        except Exception as error:
            self.log.warning("Cannot delete launch template %s: %s", name, error)
