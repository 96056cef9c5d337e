"""Adapters and machines of clouds with virtual machines (DRV-7.2, DRV-7.3)."""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nodepool import exceptions
from nodepool.cloud import AdaptiveRate, CallsStopped, Classifier, CloudCalls, ErrorKind, Poller
from nodepool.cloud.answer_cache import AnswerCache
from nodepool.cloud.http import retry_after
from nodepool.cloud.recently_gone import RecentlyGone
from nodepool.cloud.sold_out import REFUSALS, SoldOut
from nodepool.driver.common.dynamic import formatted
from nodepool.driver.common.offers import Offer
from nodepool.driver.common.options import MachineProviderConfig
from nodepool.driver.statemachine.model import Adapter, ExternalId, Instance, Resource
from nodepool.driver.statemachine.steps import Deletion, SteppedMachine, Steps, Wait
from nodepool.driver.utils import QuotaInformation
from nodepool.logconfig import Log
from nodepool.zk.records import NodeRequest

#: Factor by which reading calls may be more frequent than changing ones.
READ_FACTOR = 10
THREADS = {"read": 8, "write": 8, "delete": 8, "upload": 2}
#: Seconds for one call with its retries.
DEADLINE = 120.0
#: Maximum number of machines in one poll.
BATCH = 1000
#: Polls in a row that must miss a machine that was seen before, or that the cloud has promised.
CONFIRM = 2
#: Seconds after which an unfinished deletion is requested again: the request may not have reached
#: the cloud.
ASK_AGAIN = 60.0

T = TypeVar("T")
#: A further call, on a thread of the lane "write"; it may return a view, which saves the next poll.
Step = Callable[[], Any]


@dataclass
class Job:
    """One attempt to create a machine; steps store their results in it."""

    name: str
    label: Any
    #: External id of our upload; None for a cloud image.
    image: Any
    tags: dict[str, str]
    log: Log
    offer: Offer | None = None
    #: Something may have been created.
    begun: bool = False
    #: Polls in a row that did not find it.
    missed: int = 0
    #: Quota usage; known after the first query.
    quota: QuotaInformation = field(default_factory=lambda: QuotaInformation(instances=1))
    #: State of the driver.
    facts: dict[str, Any] = field(default_factory=dict)


def smallest(needs: Iterable[QuotaInformation]) -> QuotaInformation:
    """Return the minimum that every one of the offers needs."""
    resources = [need.get_resources() for need in needs]
    names = set(resources[0]).intersection(*resources)
    return QuotaInformation(**{name: min(each[name] for each in resources) for name in names})


class MachineInstance(Instance):
    """A virtual machine and its quota usage; None: it is not counted."""

    def __init__(
        self, external_id: ExternalId, metadata: dict[str, str], quota: QuotaInformation | None
    ) -> None:
        super().__init__()
        self.external_id = external_id
        self.metadata = metadata
        self.private_ipv6: str | None = None
        self.quota = quota

    def getQuotaInformation(self) -> QuotaInformation:
        if self.quota is None:
            raise NotImplementedError
        return self.quota


class Leftover(Resource):
    """A resource with our tags. ``id`` identifies it for deletion."""

    def __init__(self, metadata: dict[str, str], type: str, id: str) -> None:
        super().__init__(metadata, type)
        self.id = id


class ImagePart:
    """The image part of an adapter."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self.log = adapter.log

    def quietly(self, function: Callable[[], object], what: str) -> None:
        """Delete something; an error is logged only."""
        try:
            function()
        except Exception as error:
            self.log.warning("Cannot delete %s, leaving it to the leak cleanup: %s", what, error)


class CloudAdapter(Adapter):
    """What adapters of virtual machines share, however their clouds report changes."""

    #: Seconds between two polls of an image that the cloud processes.
    IMAGE_UPLOAD_SLEEP = 30
    #: The image part, which has ``upload(entry, image_name, filename, image_format, metadata)`` and
    #: ``delete(external_id)``.
    images: Any

    def __init__(self, provider_config: MachineProviderConfig) -> None:
        super().__init__(provider_config)
        self.provider = provider_config
        self.log = logging.getLogger(f"nodepool.{type(self).__name__}.{provider_config.name}")
        self._stopping = threading.Event()
        self._warned: set[str] = set()

    def warn_once(self, key: str, text: str, *args: object) -> None:
        if key not in self._warned:
            self._warned.add(key)
            self.log.warning(text, *args)

    def pause_upload(self, seconds: float | None = None) -> None:
        """Wait between two polls. Raises CallsStopped: the provider stops."""
        if self._stopping.wait(self.IMAGE_UPLOAD_SLEEP if seconds is None else seconds):
            raise CallsStopped(f"provider {self.provider.name} is stopping")

    # -- images

    def uploadImage(
        self,
        provider_image: Any,
        image_name: str,
        filename: str,
        image_format: str | None = None,
        metadata: dict[str, Any] | None = None,
        md5: str | None = None,
        sha256: str | None = None,
    ) -> str:
        image_format = image_format or str(self.provider.image_type)
        external_id: str = self.images.upload(
            provider_image, image_name, filename, image_format, metadata or {}
        )
        return external_id

    def deleteImage(self, external_id: str) -> None:
        self.log.debug("Deleting image %s", external_id)
        self.images.delete(external_id)

    def list_for_leaks(
        self, kinds: Iterable[tuple[str, Callable[[], Iterable[Leftover]]]]
    ) -> Iterable[Leftover]:
        """Yield the leftovers of all lists, skipping lists that fail."""
        for kind, fetch in kinds:
            try:
                yield from list(fetch())
            except Exception as error:
                self.log.warning(
                    "Cannot list %ss of provider %s: %s", kind, self.provider.name, error
                )


class MachineAdapter(CloudAdapter):
    """Base class; a driver implements the abstract methods for its cloud."""

    #: Minimum seconds between two polls of what is waited for.
    LOOK_FLOOR = 0.5
    #: The driver's name for its tags in messages.
    TAG = "tag"

    def __init__(self, provider_config: MachineProviderConfig, classify: Classifier) -> None:
        super().__init__(provider_config)
        self.classify = classify
        name, rate = f"{provider_config.driver.name}-{provider_config.name}", provider_config.rate
        self.calls = CloudCalls(
            provider_config.name,
            classify,
            {
                "read": AdaptiveRate(f"{name}-read", READ_FACTOR * rate),
                "write": AdaptiveRate(f"{name}-write", rate),
                "delete": AdaptiveRate(f"{name}-delete", rate),
                "upload": AdaptiveRate(f"{name}-upload", None),
            },
            threads=THREADS,
            log=self.log,
            retry_after=retry_after,
        )
        self.memo = AnswerCache()
        self.gone = RecentlyGone()
        self.sold_out: SoldOut[Offer] = SoldOut()
        self.watched: Poller[Any] = Poller(
            f"machines of {provider_config.name}",
            self.observe,
            self.calls.run,
            self.calls.timers,
            batch=BATCH,
            floor=self.LOOK_FLOOR,
            narrow=True,
            log=self.log,
        )
        #: Location by name of machines that this process has created: they are deleted without a
        #: previous poll.
        self.made_here: dict[str, str] = {}

    def stop(self) -> None:
        self._stopping.set()
        self.calls.stop()

    # -- implemented for each cloud

    @abstractmethod
    def start(self, job: Job, offer: Offer) -> None:
        """Request a machine for the offer. Sets ``job.begun`` once one may have been created."""

    @abstractmethod
    def progress(self, job: Job, view: Any) -> Instance | Step | None:
        """Return the running machine, a further step, or None to wait. Raises to end the attempt.

        :param view: result of the poller.
        """

    @abstractmethod
    def remove(self, key: str) -> bool:
        """Request the deletion, on a thread of lane "delete"; False: there is nothing to wait
        for.
        """

    @abstractmethod
    def observe(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Return what exists of these machines now, by name."""

    @abstractmethod
    def size_of(self, size: str) -> QuotaInformation:
        """Return the usage of one machine of the size.

        :raises RuntimeConfigurationException: the size does not exist.
        """

    # -- interface for machines

    def launch(self, job: Job) -> None:
        def attempt(offer: Offer) -> None:
            job.offer = offer
            try:
                self.start(job, offer)
            except Exception as error:
                if self.classify(error) in REFUSALS:
                    job.begun = False
                raise

        label = job.label
        where = f"Provider {self.provider.name}, pool {label.pool.name}, label {label.name}"
        _, offer = self.sold_out.try_in_order(label.offers, attempt, self.classify, where, job.log)
        try:
            job.quota = self.known_size(offer.size)
        except Exception as error:
            # It is being created: do not discard it because a query of its size has failed.
            job.log.warning(
                "The size of %s is not known, it counts without cores and memory: %s",
                job.name,
                error,
            )

    def failed(self, job: Job, kind: ErrorKind, text: str) -> Exception:
        """Return the exception for a machine that the cloud accepted but did not create.

        The next attempt tries the other offers, as long as there are some.
        """
        offer, offers = job.offer, job.label.offers
        assert offer is not None
        if kind not in REFUSALS:
            return exceptions.LaunchStatusException(text)
        if self.sold_out.next_after(offer, offers):
            return exceptions.OfferRefusedException(f"{text}; another offer will be tried")
        return (
            exceptions.QuotaException if kind is ErrorKind.QUOTA else exceptions.CapacityException
        )(text)

    def seen(self, job: Job, what: str, there: bool) -> None:
        """Count polls that miss a machine which the cloud has promised.

        :raises LaunchStatusException: there were too many in a row.
        """
        job.missed = 0 if there else job.missed + 1
        if job.missed > CONFIRM:
            raise exceptions.LaunchStatusException(f"{what} {job.name} has vanished")

    @property
    def problem(self) -> str | None:
        """Return why there are no credentials, for operators."""
        return None

    def labelReady(self, label: Any) -> bool:
        return self.problem is None

    def whyNotReady(self, label: Any) -> str | None:
        return self.problem

    def is_ours(self, key: str, metadata: Mapping[str, str]) -> bool:
        """Return whether the machine is ours: another installation may use the same names."""
        if metadata.get("nodepool_provider_name") == self.provider.name:
            return True
        self.log.warning("Machine %s does not have the tags of this provider, ignoring it", key)
        return False

    def delete(self, operation: str, function: Callable[[], Any]) -> bool:
        """Request a deletion; return False if it does not exist (by an error or ``function``)."""
        try:
            return (
                self.calls.call(operation, function, lane="delete", deadline=DEADLINE) is not False
            )
        except Exception as error:
            if self.classify(error) is ErrorKind.NOT_FOUND:
                return False
            raise

    def read(self, operation: str, function: Callable[[], T], **options: Any) -> T:
        return self.calls.call(operation, function, deadline=DEADLINE, **options)

    # -- interface for the framework

    def plannedExternalId(self, label: Any, node_id: str) -> ExternalId:
        return f"np{node_id}"

    def tags_of(
        self, label: Any, metadata: dict[str, str], request: NodeRequest | None, log: Log
    ) -> dict[str, str]:
        """Return the tags; ours identify the machine and cannot be overridden."""
        return {**label.tags, **formatted(label.dynamic_tags, request, log, self.TAG), **metadata}

    def getCreateStateMachine(
        self,
        hostname: str,
        label: Any,
        image_external_id: Any,
        metadata: dict[str, str],
        request: NodeRequest,
        az: str | None,
        log: Log,
    ) -> CreateMachine:
        return CreateMachine(
            self,
            Job(
                hostname, label, image_external_id, self.tags_of(label, metadata, request, log), log
            ),
        )

    def getDeleteStateMachine(self, external_id: ExternalId, log: Log) -> DeleteMachine:
        return DeleteMachine(self, external_id, log)

    def limits(
        self, reported: Mapping[Any, Any], metrics: Mapping[str, str], cloud: str, place: str
    ) -> QuotaInformation:
        """Return the limits that the cloud reports; none is assumed where one is missing.

        :param metrics: the cloud's name of each resource.
        """
        found: dict[str, float] = {}
        for name, metric in metrics.items():
            if reported.get(metric) is None:
                text = "%s reports no limit of %s in %s, assuming none"
                self.warn_once(metric, text, cloud, metric, place)
            else:
                found[name] = float(reported[metric])
        return QuotaInformation(default=math.inf, **found)

    def getQuotaForLabel(self, label: Any) -> QuotaInformation:
        """Return the minimum that every offer of the label needs."""
        return smallest(
            self.size_of(size) for size in dict.fromkeys(offer.size for offer in label.offers)
        )

    def known_size(self, size: str) -> QuotaInformation:
        """Return the usage of an existing machine; one of an unknown size counts as an instance."""
        try:
            return self.size_of(size)
        except (exceptions.RuntimeConfigurationException, KeyError) as error:
            self.warn_once(
                f"size {size}",
                "Size %s is not known, its machines count without cores and memory: %s",
                size,
                error,
            )
            return QuotaInformation(instances=1)

    def findMissingInstances(self, external_ids: list[Any]) -> list[Any]:
        found: dict[str, Any] = {}
        wanted = [str(each) for each in external_ids if each]
        for _ in range(CONFIRM):
            left = [key for key in wanted if key not in found]
            if left:
                found.update(self.observe(left))
        return [each for each in external_ids if self.is_lost(found.get(str(each)))]

    def is_deleted(self, view: Any) -> bool:
        """Return whether nothing exists any more that the deletion has to wait for."""
        return view is None

    def is_lost(self, view: Any) -> bool:
        """Return whether a node on it is unusable."""
        return view is None


class CreateMachine(SteppedMachine):
    def __init__(self, adapter: MachineAdapter, job: Job) -> None:
        super().__init__()
        self.adapter = adapter
        self.job = job
        self.external_id = job.name

    def steps(self) -> Steps[Instance]:
        adapter, job = self.adapter, self.job
        try:
            yield from self._write(lambda: adapter.launch(job))
        except exceptions.FOREIGN:
            if not job.begun:
                self.external_id = None  # nothing to delete
            raise
        found = yield from self._watch("launch")
        while not isinstance(found, Instance):
            view = yield from self._write(found)
            found = (adapter.progress(job, view) if view is not None else None) or (
                yield from self._watch("step")
            )
        return found

    def _write(self, function: Step) -> Steps[Any]:
        return self.call(self.adapter.calls.run(function, lane="write"), self._remove_late)

    def _watch(self, kind: str) -> Steps[Instance | Step]:
        """Wait until the machine runs or needs a further step."""
        watch = self.adapter.watched.watch(self.job.name, self._wake, (kind, self.job.label.name))
        while True:
            answer = yield from self.answer(watch)
            found = self.adapter.progress(self.job, answer.value)
            if found is not None:
                watch.end()
                return found

    def _remove_late(self, _call: Future[Any]) -> None:
        """Delete what a call may have created after its launch was abandoned and deleted."""
        if self.job.begun:
            adapter, name = self.adapter, self.job.name
            adapter.calls.run(lambda: adapter.remove(name), lane="delete")


class DeleteMachine(Deletion):
    adapter: MachineAdapter

    def steps(self) -> Steps[None]:
        if not self.external_id:
            return
        adapter, key, gone = self.adapter, str(self.external_id), False
        while not gone:
            since = time.monotonic()
            asked = yield from self.call(
                adapter.calls.run(lambda: adapter.remove(key), lane="delete")
            )
            gone = not asked or (yield from self._wait_deleted(key, since))
        adapter.gone.add(key)

    def _wait_deleted(self, key: str, since: float) -> Steps[bool]:
        """Wait until nothing exists. Return False if the deletion has to be requested again."""
        watch = self.adapter.watched.watch(key, self._wake, "delete")
        while (answer := watch.latest) is None or not self.adapter.is_deleted(answer.value):
            if time.monotonic() - since > ASK_AGAIN:
                self.log.warning(
                    "%s still exists after %.0f s, requesting its deletion again", key, ASK_AGAIN
                )
                watch.end(reached=False)
                return False
            yield Wait(watch=watch)
        watch.end()
        return True
