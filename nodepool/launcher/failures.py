"""LaunchFailures: labels whose launches keep failing stop costing machines (LAU-9).

The failures since the last success are one note per provider and label in ZooKeeper, so that the
launchers of a provider share them and a restart forgets none. After as many as the option
``max-launch-failures-per-hour`` allows, no launch starts; when fewer lie within the last hour, one
request at a time is tried.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable

from nodepool.base.problems import Problem
from nodepool.config.model import Config, ProviderConfig
from nodepool.driver.request.base import Trial
from nodepool.reasons import Code, Reason, because
from nodepool.zk.failures import MEMORY, MOST, Attempt, Failures
from nodepool.zk.mirror import notes
from nodepool.zk.records import BUILDING, INIT
from nodepool.zk.writer import Txn
from nodepool.zk.zookeeper import ZooKeeper

HOUR = 3600.0
#: What an operator can do.
REMEDY = (
    "repair what the message names, then run `nodepool retry {label}`; otherwise one request at a "
    "time is tried when fewer of the failures lie within the last hour"
)

#: A provider and one of its labels.
Key = tuple[str, str]


class LaunchFailures:
    """Counts failed launches and decides whether another one may start. Thread-safe.

    Attempts are written without waiting. One that cannot be written counts here, and is written
    when the record changes or the mirror is synchronized again.

    :param now: returns the UNIX time, on which all launchers have to agree.
    """

    log = logging.getLogger("nodepool.LaunchFailures")

    def __init__(self, zk: Callable[[], ZooKeeper], now: Callable[[], float]) -> None:
        self._zk = zk
        self._now = now
        self._lock = threading.Lock()
        #: The records of the mirror with their versions.
        self._stored: dict[Key, tuple[Failures, int]] = {}
        #: Attempts that are being written, and those to be written afterwards.
        self._sent: dict[Key, list[Attempt]] = {}
        self._waiting: dict[Key, list[Attempt]] = {}
        #: The last configuration of each provider, with its digest.
        self._digests: dict[str, tuple[ProviderConfig, str]] = {}
        self._number = itertools.count()

    # -- decisions

    def blocked(
        self, provider: ProviderConfig, labels: Iterable[str], request_id: str | None = None
    ) -> tuple[list[str], Reason] | None:
        """Return the labels of which no nodes may be launched now, and why.

        :param labels: one for each node.
        :param request_id: of the request that they are for; its running launches do not count.
        """
        if not (self._stored or self._waiting or self._sent):
            return None
        found: list[str] = []
        error = ""
        for label, wanted in Counter(labels).items():
            record, times = self._failures(provider, label)
            if record is None or not 0 < (limit := _limit(provider)) <= len(times):
                continue
            left = limit - len(self._recent(times))
            if left < min(wanted, limit) or self._is_trying(provider.name, label, request_id):
                found.append(label)
                error = record.error
        if not found:
            return None
        found.sort()
        return found, because(
            Code.LAUNCHES_FAIL, labels=",".join(found), provider=provider.name, error=error
        )

    def _recent(self, times: list[float]) -> list[float]:
        now = self._now()
        return [time for time in times if abs(now - time) < HOUR]

    def _is_trying(self, provider: str, label: str, request_id: str | None) -> bool:
        """Return whether a launcher launches a node of the label for another request."""
        tree = self._zk().node_tree
        with tree.lock:
            # Nodes that were recorded before the version of our record that we know are in the
            # mirror, or are being read.
            if any(path.rpartition("/")[2] not in tree.nodes for path in tree.changing()):
                return True
            states = tree.counted.providers[provider]
            return bool(states[INIT] or states[BUILDING]) and any(
                node.state in (INIT, BUILDING)
                and node.provider == provider
                and label in node.type
                and node.allocated_to != request_id
                for node in tree.nodes.values()
            )

    def _failures(
        self, provider: ProviderConfig, label: str
    ) -> tuple[Failures | None, list[float]]:
        """Return the record and the times of failures with this configuration."""
        key = provider.name, label
        if key not in self._stored and key not in self._waiting and key not in self._sent:
            return None, []
        with self._lock:
            record = self._record(key)
        return record, record.of(self._digest(provider))

    def _record(self, key: Key) -> Failures:
        """Return the record with all attempts; with the lock."""
        record = self._stored[key][0] if key in self._stored else Failures(*key)
        for attempt in (*self._sent.get(key, ()), *self._waiting.get(key, ())):
            record = record.after(attempt)
        return record

    def _digest(self, provider: ProviderConfig) -> str:
        known = self._digests.get(provider.name)
        if known is None or known[0] is not provider:
            # Plain values of YAML; JSON cannot sort keys of different types.
            text = repr(provider.provider).encode(errors="replace")
            known = provider, hashlib.sha256(text).hexdigest()[:8]
            self._digests[provider.name] = known
        return known[1]

    def trials(self, provider: ProviderConfig, labels: Iterable[str]) -> list[Trial]:
        """Return the writes with which only one launcher at a time starts a trial.

        Ask for them before :meth:`blocked`: each write changes the version that others expect.
        """
        stored, found = self._stored, []
        for key in {(provider.name, label) for label in labels} & stored.keys():
            record, version = stored[key]
            if 0 < _limit(provider) <= len(self._failures(provider, key[1])[1]):
                data = json.dumps(record.values()).encode()
                found.append((notes.path(record), data, version))
        return found

    # -- attempts

    def failed(self, provider: ProviderConfig, label: str, error: str) -> bool:
        """Count a failed launch; return whether its request must not try again."""
        limit = _limit(provider)
        if limit <= 0:
            return False
        # Failures of the same moment differ in microseconds.
        now = self._now() - next(self._number) % 1000 * 1e-6
        self._add((provider.name, label), Attempt(self._digest(provider), now, error))
        _record, times = self._failures(provider, label)
        stopped = len(self._recent(times)) >= limit
        if stopped:
            self.log.warning(
                "Launches of label %s in provider %s are stopped: %s failed within an hour: %s",
                label,
                provider.name,
                limit,
                error,
            )
        return stopped

    def succeeded(self, provider: ProviderConfig, label: str) -> None:
        """Forget the failures, because a launch has succeeded."""
        if self._failures(provider, label)[1]:
            self._add((provider.name, label), Attempt(self._digest(provider)))

    def _add(self, key: Key, attempt: Attempt) -> None:
        with self._lock:
            self._waiting[key] = [*self._waiting.get(key, ()), attempt][-MOST:]
        self._write(key)

    # -- ZooKeeper

    def changed(self, tree: notes.NoteTree) -> None:
        """Adopt the records of the mirror, which have changed, and write what could not be."""
        found = tree.notes.values()
        with self._lock:
            self._stored = {
                (note.provider, note.label): (note, version)
                for note, version in found
                if isinstance(note, Failures)
            }
        self.flush()

    def flush(self) -> None:
        """Write attempts that could not be written before."""
        for key in list(self._waiting):
            self._write(key)

    def expire(self) -> None:
        """Delete records that nobody needs any more, also those of removed labels."""
        for record, version in list(self._stored.values()):
            if not record.times or record.times[-1][0] < self._now() - MEMORY:
                txn = Txn(self._zk().kazoo_client)
                txn.delete(notes.path(record), version)
                self._zk().writer.submit(txn)

    def _write(self, key: Key) -> None:
        """Write the record with the attempts, unless it is being written.

        If another client has changed it meanwhile, its new version is, or will be, announced.
        """
        with self._lock:
            if key in self._sent or key not in self._waiting:
                return
            stored = self._stored.get(key)
            record = self._record(key)
            attempts = self._waiting.pop(key)
            if stored is None and not record.times:
                return  # succeeded before the failures were written
            self._sent[key] = attempts
        tree, txn = self._zk().note_tree, Txn(self._zk().kazoo_client)
        data = json.dumps(record.values()).encode()
        if stored is None:
            txn.create(notes.path(record), data, tree=tree, record=record)
        elif record.times:
            txn.set(notes.path(record), data, stored[1], tree=tree, record=record)
        else:
            txn.delete(notes.path(record), stored[1])

        def written(_results: object, error: BaseException | None) -> None:
            with self._lock:
                del self._sent[key]
                if error is not None:
                    self._waiting[key] = [*attempts, *self._waiting.get(key, ())][-MOST:]
                again = error is None or self._stored.get(key) != stored
            if again:
                self._write(key)
            elif error is not None:
                self.log.debug("Cannot write %s yet: %r", notes.path(record), error)

        try:
            self._zk().writer.submit(txn, written)
        except RuntimeError as error:
            written(None, error)

    # -- problems

    def problems(self, config: Config) -> list[Problem]:
        """Return the labels whose launches are stopped, or tried one at a time."""
        found: list[Problem] = []
        for name, label in sorted({*self._stored, *self._waiting}):
            provider = config.providers.get(name)
            if provider is None or label not in provider.getSupportedLabels():
                continue
            record, times = self._failures(provider, label)
            limit = _limit(provider)
            if record is not None and 0 < limit <= len(times):
                text = f"{limit} launches in a row have failed, the last one: {record.error}"
                found.append(Problem(text, name, label, help=REMEDY.format(label=label)))
        return found


def _limit(provider: ProviderConfig) -> int:
    """Return the number of failures that stop launches; 0 or less: none does."""
    return min(provider.max_launch_failures_per_hour, MOST)
