"""State machines for the creation and deletion of one sliver (NM-C.8)."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from nodepool import exceptions
from nodepool.config.model import ProviderConfig
from nodepool.driver import statemachine
from nodepool.driver.nodemanager.answers import metadata_of
from nodepool.driver.nodemanager.config import NodeManagerLabel
from nodepool.driver.nodemanager.host import INTERNAL, MARGIN, WAIT, ManagedHost
from nodepool.driver.nodemanager.hosts import Hosts
from nodepool.driver.nodemanager.sizes import quota_for, quota_of, rspec_of
from nodepool.driver.statemachine.steps import SteppedMachine, Steps, Wait
from nodepool.driver.utils import QuotaInformation
from nodepool.logconfig import Log
from nodepool.nodemanager.client.rpc import RpcError, RpcFault
from nodepool.nodemanager.client.texts import clean

#: Seconds that a launch waits for a host that has stopped answering, before it uses another one.
LOST = 5.0
#: Seconds after which the deletion leaves a sliver of a silent host to the leak cleanup, and to its
#: lease.
GIVE_UP = 30.0
#: Seconds between two attempts.
RETRY = 1.0


class NodeManagerInstance(statemachine.Instance):
    """A sliver.

    :param quota: the usage it counts with; default: what it was granted.
    """

    def __init__(
        self,
        host: ManagedHost,
        sliver: dict[str, Any],
        provider: ProviderConfig,
        quota: QuotaInformation | None = None,
    ) -> None:
        super().__init__()
        effective = sliver.get("effective") or {}
        self._quota = quota if quota is not None else quota_of(effective, host.cores)
        self.external_id = {"host": host.name, "sliver": sliver["name"]}
        self.metadata = metadata_of(sliver)
        self.ready = sliver.get("state") == "ready"
        # The host's other address is useless for a server that the sliver runs itself.
        self.interface_ip = (
            None if sliver.get("own_ssh") else host.options.ssh_address
        ) or sliver.get("ssh_address")
        self.public_ipv4 = self.private_ipv4 = self.interface_ip
        self.connection_port = sliver.get("ssh_port") or 22
        self.host_keys = list(sliver.get("host_keys") or [])
        self.host_id = host.name
        self.az = host.group
        self.cloud = provider.name
        self.slot = sliver.get("index")
        self.driver_data = {"rspec": effective}
        if sliver.get("username"):
            self.username = sliver["username"]

    def getQuotaInformation(self) -> QuotaInformation:
        return self._quota


class NodeManagerResource(statemachine.Resource):
    def __init__(self, host: str, sliver: dict[str, Any]) -> None:
        super().__init__(metadata_of(sliver), "instance")
        self.host = host
        self.id = sliver["name"]

    def belongs_to(self, external_id: object) -> bool:
        """Return whether it is the sliver in the record.

        A launch whose host did not answer may have another one on that host.
        """
        return not isinstance(external_id, dict) or external_id == {
            "host": self.host,
            "sliver": self.id,
        }


class CreateMachine(SteppedMachine):
    """Creates a sliver on the best host; uses another one when it does not answer."""

    #: Seconds that a host may be silent before the launch uses another one.
    _patience = LOST

    def __init__(
        self,
        hosts: Hosts,
        name: str,
        label: NodeManagerLabel,
        image: str,
        metadata: dict[str, str],
        az: str | None,
        log: Log,
    ) -> None:
        super().__init__()
        self._hosts = hosts
        self._name = name
        self._label = label
        self._image = image
        self._metadata = metadata
        self._az = az
        self._log = log
        #: Why hosts refused.
        self._refusals: dict[str, RpcFault] = {}
        #: Hosts that did not answer; they may have a sliver of this name.
        self._silent: set[str] = set()
        #: Why the launch makes no progress; the launcher logs and publishes it.
        self.trouble: str | None = None

    def steps(self) -> Steps[NodeManagerInstance]:
        while True:
            host = yield from self._find_host()
            sliver, waited = (yield from self._put(host)), False
            while sliver is not None and not self._is_ready(host, sliver, waited):
                sliver, waited = (yield from self._await_ready(host)), True
            if sliver is not None:
                return self._instance(host, sliver)

    def _find_host(self) -> Steps[ManagedHost]:
        hosts = self._hosts
        while (
            host := hosts.choose(
                self._label, self._image, self._az, self._refusals.keys() | self._silent
            )
        ) is None:
            if self._refusals:
                raise self._refused_by_all()
            # No host answers. The launch timeout ends this.
            zone = f" in zone {self._az}" if self._az else ""
            self.trouble = f"no host{zone} can be used: {hosts.problems() or 'none is known'}"
            self._silent.clear()
            hosts.wake_on_change(self._wake)
            yield Wait(until=time.monotonic() + RETRY)
        self.trouble = None
        return host

    def _refused_by_all(self) -> Exception:
        texts = "; ".join(f"{name}: {fault.text}" for name, fault in sorted(self._refusals.items()))
        if not self._silent:
            self.external_id = None
        if any(
            fault.code == INTERNAL and fault.text.startswith("quota:")
            for fault in self._refusals.values()
        ):
            reason = self._hosts.never_fits(self._label, self._az)
            if reason is None:
                return exceptions.QuotaException(texts)
            texts = reason
        return exceptions.LaunchStatusException(f"no host accepts {self._name}: {texts}")

    def _put(self, host: ManagedHost) -> Steps[dict[str, Any] | None]:
        """Return the sliver, or None if another host is needed."""
        # Before the record is sent: whatever happens, the deletion knows the host.
        self.external_id = {"host": host.name, "sliver": self._name}
        self._reserve(host)
        try:
            sliver: dict[str, Any] = yield from self.call(host.ask("PutRecord", self._record(host)))
            return sliver
        except RpcFault as fault:
            self._refused(host, fault)
        except RpcError as error:
            self._host_failed(host, error)
        return None

    def _record(self, host: ManagedHost) -> dict[str, Any]:
        label, provider = self._label, self._hosts.provider
        source = label.cloud_image or provider.diskimages[label.diskimage.name]
        return {
            "account_type": "sliver",
            "name": self._name,
            "image": self._image,
            "rspec": rspec_of(label, host.cores),
            "ssh_keys": provider.keys_of(self._name, label.ssh_keys),
            "metadata": dict(self._metadata),
            "username": source.username or "root",
            "expiry": int(time.time()) + provider.lease_time,
            "plc_instantiated": True,
            "hostname": self._name,
            **({"network": label.network} if label.network else {}),
            **({"privileges": list(label.privileges)} if label.privileges else {}),
        }

    def _reserve(self, host: ManagedHost) -> None:
        host.reserve(self._label)

    def _refused(self, host: ManagedHost, fault: RpcFault) -> None:
        self._refusals[host.name] = fault
        host.forget()

    def _host_failed(self, host: ManagedHost, error: RpcError) -> None:
        self._log.warning("Sliver %s is moved to another host: %s", self._name, error)
        self._silent.add(host.name)

    def _await_ready(self, host: ManagedHost) -> Steps[dict[str, Any] | None]:
        """Return the sliver once it is ready or after :data:`WAIT`; None: use another host."""
        silent_since: float | None = None
        while True:
            trying = silent_since is not None
            seconds, timeout = (0, 2.0) if trying else (WAIT, WAIT + MARGIN)
            call = host.ask(
                "WaitSliver",
                self._name,
                "ready",
                seconds,
                timeout=timeout,
                wait=True,
                patient=trying,
            )
            try:
                sliver: dict[str, Any] = yield from self.call(call)
                return sliver
            except RpcError as error:
                # The node manager may have restarted, which slivers survive.
                now = time.monotonic()
                silent_since = silent_since or now
                if now - silent_since >= self._patience:
                    self._host_failed(host, error)
                    return None
            yield from self.sleep(RETRY)

    def _is_ready(self, host: ManagedHost, sliver: dict[str, Any], waited: bool) -> bool:
        state = sliver.get("state")
        if state == "failed" or (waited and state in ("absent", "disabled", "deleting")):
            host.launch_failed()
            reason = clean(str(sliver.get("error") or "it was changed by others")[:1000])
            raise exceptions.LaunchStatusException(
                f"sliver {self._name} on {host.name} is {state}: {reason}"
            )
        return state == "ready"

    def _instance(self, host: ManagedHost, sliver: dict[str, Any]) -> NodeManagerInstance:
        return NodeManagerInstance(
            host, sliver, self._hosts.provider, quota_for(self._label, host.capacity)
        )


class DeleteMachine(SteppedMachine):
    """Deletes the sliver and waits until nothing of it exists.

    :param delete: as :meth:`.Hosts.delete`.
    """

    def __init__(
        self, delete: Callable[[str, str], Future[bool]], external_id: object, log: Log
    ) -> None:
        super().__init__()
        self._delete = delete
        self.external_id = external_id
        self._log = log

    def steps(self) -> Steps[None]:
        if not isinstance(self.external_id, dict):
            raise exceptions.NotFound
        host, sliver = self.external_id.get("host"), self.external_id.get("sliver")
        silent_since: float | None = None
        while True:
            try:
                if (yield from self.call(self._delete(str(host), str(sliver)))):
                    return
                silent_since = None
                continue
            except RpcError as error:
                # The host does not answer, or is not announced at present.
                now = time.monotonic()
                silent_since = silent_since or now
                if now - silent_since >= GIVE_UP:
                    self._log.warning(
                        "Sliver %s cannot be deleted; it ends with its lease, or when its host is "
                        "back: %s",
                        sliver,
                        error,
                    )
                    return
            yield from self.sleep(RETRY)
