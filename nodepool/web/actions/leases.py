"""Leases by the API: create, poll, renew, describe, return, connect."""

from __future__ import annotations

import dataclasses
import datetime
import http
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from kazoo.exceptions import KazooException

from nodepool.access.identity import Identity, Role
from nodepool.access.tokens import LEASE_PREFIX, digest
from nodepool.base.offered_labels import why_not_offered
from nodepool.config.model import Config
from nodepool.lease import Lease, LeaseError, Leases, LeaseState, Reason, Terms, certificates, ssh
from nodepool.lease.record import MOST_NOTES
from nodepool.ssh import config as ssh_config
from nodepool.ssh import known_hosts
from nodepool.status import causes
from nodepool.status.explain import places
from nodepool.status.once import Once
from nodepool.texts import one_line
from nodepool.web.actions.bodies import (
    Caller,
    Certificate,
    Description,
    KillView,
    LeaseList,
    LeaseView,
    NewCertificate,
    NewLease,
    NodeView,
    Renewal,
    Why,
)
from nodepool.web.actions.routes import Call, Later, Refused, Reply, Route, busy
from nodepool.web.actions.waiting import Waiting
from nodepool.web.http import RETRY
from nodepool.web.shares import Share
from nodepool.zk.drains import Drain, of_node, shown
from nodepool.zk.history import HistoryReader, kills_of, place_of
from nodepool.zk.mirror.feed import KILLED, Event
from nodepool.zk.records import Node
from nodepool.zk.zookeeper import ZooKeeper

log = logging.getLogger("nodepool.lease")

LONGEST_WAIT = 60.0
#: Seconds in which a request that was fulfilled must appear as nodes in the mirror.
GRACE = 2.0
#: Kills for memory that a lease shows; seconds by which clocks may differ.
MOST_KILLS, CLOCKS = 20, 600.0
_NO_HEADERS: tuple[tuple[str, str], ...] = ()
OPEN = (LeaseState.WAITING, LeaseState.READY)
_STATUS = {
    Reason.NOT_FOUND: http.HTTPStatus.NOT_FOUND,
    Reason.NOT_READY: http.HTTPStatus.CONFLICT,
    Reason.FAILED: http.HTTPStatus.CONFLICT,
    Reason.ENDED: http.HTTPStatus.GONE,
    Reason.TOO_LATE: http.HTTPStatus.CONFLICT,
    Reason.KEY_IN_USE: http.HTTPStatus.CONFLICT,
    Reason.UNAVAILABLE: http.HTTPStatus.CONFLICT,
    Reason.TOO_MANY: http.HTTPStatus.TOO_MANY_REQUESTS,
    Reason.BAD_REQUEST: http.HTTPStatus.UNPROCESSABLE_ENTITY,
}


@contextmanager
def refusals() -> Iterator[None]:
    """Turn errors of leases into answers."""
    try:
        yield
    except LeaseError as error:
        if error.reason is Reason.BUSY:
            raise busy(str(error)) from error
        raise Refused(_STATUS[error.reason], error.reason.value, str(error)) from error


class LeaseCalls:
    """The calls on leases.

    :param zk: returns the facade, which has a mirror.
    :param config: returns the configuration in force; None: there is none yet.
    """

    def __init__(
        self,
        zk: Callable[[], ZooKeeper],
        config: Callable[[], Config | None],
        waiting: Waiting,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._zk = zk
        self._config = config
        self.waiting = waiting
        self._now = now
        self.monotonic = monotonic
        self._history = HistoryReader(KILLED)

    def routes(self) -> list[Route]:
        ok, created, accepted, empty = (
            http.HTTPStatus.OK,
            http.HTTPStatus.CREATED,
            http.HTTPStatus.ACCEPTED,
            http.HTTPStatus.NO_CONTENT,
        )
        wait = {
            "wait": "seconds to wait, at most 60, while the lease is in the given state",
            "state": "default: waiting",
        }
        formats = {"format": "config or known_hosts", "directory": "of the files, for config"}
        one, lease = "/leases/{id}", "lease {id}"
        return [
            Route(
                "GET",
                "/me",
                self.me,
                "Show who you are, and what you may do",
                Role.READ,
                {ok: Caller},
            ),
            Route(
                "POST",
                "/leases",
                self.create,
                "Lease nodes",
                Role.BORROW,
                {created: LeaseView, accepted: LeaseView, ok: LeaseView},
                NewLease,
                target="lease",
            ),
            Route(
                "GET",
                "/leases",
                self.list,
                "List leases and held nodes",
                Role.READ,
                {ok: LeaseList},
                query={"owner": "only of this owner; me: your own", "state": "only in this state"},
            ),
            Route(
                "GET",
                one,
                self.show,
                "Show a lease, or wait until its state changes",
                Role.READ,
                {ok: LeaseView},
                of_lease=True,
                query=wait,
            ),
            Route(
                "POST",
                one + "/renew",
                self.renew,
                "Let a lease end later",
                Role.BORROW,
                {ok: LeaseView},
                Renewal,
                of_lease=True,
                target=lease,
            ),
            Route(
                "PATCH",
                one,
                self.describe,
                "Change purpose and notes",
                Role.BORROW,
                {ok: LeaseView},
                Description,
                of_lease=True,
                target=lease,
            ),
            Route(
                "DELETE",
                one,
                self.give_back,
                "Return a lease, or stop waiting for it",
                Role.BORROW,
                {empty: None},
                of_lease=True,
                target=lease,
            ),
            Route(
                "GET",
                one + "/ssh",
                self.ssh,
                "Return files to connect by SSH",
                Role.BORROW,
                {ok: str},
                of_lease=True,
                query=formats,
            ),
            Route(
                "GET",
                one + "/inventory",
                self.inventory,
                "Return Ansible's dynamic inventory",
                Role.BORROW,
                {ok: dict[str, Any]},
                of_lease=True,
            ),
            Route(
                "POST",
                one + "/certificate",
                self.certificate,
                "Sign an SSH key for the nodes of a lease",
                Role.BORROW,
                {ok: Certificate},
                NewCertificate,
                of_lease=True,
                target=lease,
            ),
        ]

    @property
    def leases(self) -> Leases:
        config = self._config()
        return Leases(self._zk(), self._now, math.inf if config is None else config.max_hold_age)

    @staticmethod
    def me(call: Call) -> Reply:
        one = call.identity
        return Reply(
            Caller(
                one.owner, one.via, one.role.name.lower(), one.tenant, list(one.labels), one.longest
            )
        )

    # -- create

    def create(self, call: Call) -> Reply | Later:
        body = call.parsed(NewLease)
        identity = call.identity
        self._check(identity, body)
        self._check_end(identity, body.seconds)
        if self.waiting.full(identity.owner):
            raise busy(f"Too many leases wait here, or for {identity.owner}; try again later")
        secret = secrets.token_urlsafe(32)
        terms = Terms(
            identity.owner,
            identity.via,
            body.purpose,
            key=call.key,
            secret=digest(secret),
            longest=identity.longest,
            notes=_checked_notes(body.notes),
        )
        try:
            with refusals():
                lease = self.leases.ask(
                    body.labels,
                    terms,
                    body.tenant or identity.tenant,
                    body.provider,
                    body.priority,
                    identity.per_owner,
                )
        except (KazooException, TimeoutError):
            self.waiting.withdraw(terms.secret)
            raise
        known = lease.terms.secret != terms.secret
        if known and lease.state is LeaseState.HELD:
            # The client that repeats a call may have lost the answer, and with it the token.
            with refusals():
                lease = self.leases.describe(lease.id, secret=terms.secret)
        token = (
            None
            if known and lease.state is not LeaseState.HELD
            else f"{LEASE_PREFIX}{lease.id}_{secret}"
        )
        if lease.state is not LeaseState.HELD and not known:
            self.waiting.expect(lease.id, body.seconds, identity.owner)
        status = http.HTTPStatus.OK if known else http.HTTPStatus.CREATED
        return self._answer(lease.id, body.wait, identity, OPEN, token, status)

    def _check(self, identity: Identity, body: NewLease) -> None:
        """Check what the caller may ask for."""
        forbidden = [label for label in body.labels if not identity.offers(label)]
        if forbidden:
            raise _forbidden(
                "not-allowed",
                f"You may not lease {', '.join(forbidden)}; allowed: {', '.join(identity.labels)}",
            )
        refused = None if (config := self._config()) is None else config.why_not_leased(body.labels)
        if refused is not None:
            raise _forbidden("not-allowed", refused)
        if identity.tenant is not None and body.tenant not in (None, identity.tenant):
            raise _forbidden("not-allowed", f"You may lease for tenant {identity.tenant} only")
        if body.priority == "100" and identity.role < Role.OPERATE:
            raise _forbidden("not-allowed", "Priority 100 needs the role operate")
        pools = self._zk().getRegisteredPools()
        missing = why_not_offered(body.labels, pools, "launcher") if pools else None
        if missing is not None:
            raise Refused(http.HTTPStatus.UNPROCESSABLE_ENTITY, "unknown-label", missing)

    def _check_end(self, identity: Identity, seconds: float) -> None:
        """Check the end of a lease against the limit of the caller."""
        if identity.longest is not None and seconds > identity.longest:
            latest = utc(self._now() + identity.longest)
            raise _forbidden(
                "cap",
                f"A lease may last {identity.longest:g} s from now, until {latest.isoformat()}",
            )

    # -- read

    def list(self, call: Call) -> Reply:
        owner, state = call.query.get("owner"), call.query.get("state")
        owner = call.identity.owner if owner == "me" else owner
        found = [
            lease
            for lease in self.leases.all()
            if owner in (None, lease.terms.owner) and state in (None, lease.state.value)
        ]
        order = (
            places(self._zk().readRequests()) if any(lease.state in OPEN for lease in found) else {}
        )
        kills = self._kills(found)
        return Reply(
            LeaseList(
                [self.view(lease, call.identity, order=order, kills=kills) for lease in found]
            )
        )

    def show(self, call: Call) -> Reply | Later:
        state = call.query.get("state", "waiting")
        known = {each.value: (each,) for each in LeaseState} | {"waiting": OPEN}
        if state not in known:
            raise Refused(
                http.HTTPStatus.UNPROCESSABLE_ENTITY,
                "bad-request",
                f"state must be one of {', '.join(known)}",
            )
        wait = _seconds(call.query.get("wait", "0"))
        lease = None if wait else self.leases.get(call.names["id"])
        if lease is not None and lease.state not in known[state]:
            # What waits for a lease does not wait for the history.
            return Reply(self.view(lease, call.identity, kills=self._kills([lease])))
        return self._answer(call.names["id"], wait, call.identity, known[state])

    def _answer(
        self,
        lease_id: str,
        wait: float,
        identity: Identity,
        while_in: tuple[LeaseState, ...],
        token: str | None = None,
        created: http.HTTPStatus | None = None,
    ) -> Reply | Later:
        """Return the lease when it is in another state, or after some seconds."""
        poll = _Poll(self, lease_id, self.monotonic() + wait, identity, while_in, token, created)
        return poll.read() or poll

    def ended(self, lease_id: str) -> Refused:
        ended = self.waiting.ended(lease_id)
        code, text = ended or ("ended", f"Lease {lease_id} does not exist, or has ended")
        return Refused(http.HTTPStatus.GONE, code, text)

    def _of(self, call: Call) -> Lease:
        """Return the lease of a call that changes it, or reads its connection data.

        :raises Refused: it does not exist (410), or belongs to somebody else (403).
        """
        lease = self.leases.get(call.names["id"])
        if lease is None:
            raise self.ended(call.names["id"])
        if not _may_use(call.identity, lease):
            raise _forbidden("not-allowed", f"Lease {lease.id} belongs to {lease.terms.owner}")
        return lease

    # -- change

    def renew(self, call: Call) -> Reply:
        lease, seconds = self._of(call), call.parsed(Renewal).seconds
        self._check_end(call.identity, seconds)
        with refusals():
            return Reply(self.view(self.leases.renew(lease.id, seconds), call.identity))

    def describe(self, call: Call) -> Reply:
        lease, body = self._of(call), call.parsed(Description)
        purpose = None if body.purpose is msgspec.UNSET else body.purpose
        notes = None if body.notes is msgspec.UNSET else _checked_notes(body.notes)
        with refusals():
            return Reply(self.view(self.leases.describe(lease.id, purpose, notes), call.identity))

    def give_back(self, call: Call) -> Reply:
        try:
            lease = self._of(call)
            with refusals():
                self.leases.give_back(lease.id, lease)
        except Refused as error:
            if error.status != http.HTTPStatus.GONE:  # it has ended already
                raise
        return Reply(None, http.HTTPStatus.NO_CONTENT)

    def held(self, call: Call) -> Lease:
        """Return the lease of a call that needs its nodes."""
        lease = self._of(call)
        if lease.state is not LeaseState.HELD:
            raise Refused(
                http.HTTPStatus.CONFLICT, "not-ready", f"Lease {lease.id} is {lease.state.value}"
            )
        return lease

    def ssh(self, call: Call) -> Reply:
        form, directory = call.query.get("format", "config"), call.query.get("directory", ".")
        if form not in ("config", "known_hosts"):
            raise Refused(
                http.HTTPStatus.UNPROCESSABLE_ENTITY,
                "bad-request",
                "format must be config or known_hosts",
            )
        nodes = ssh.machines(self.held(call).nodes)
        try:
            return Reply(ssh_config(nodes, directory) if form == "config" else known_hosts(nodes))
        except ValueError as error:
            raise Refused(http.HTTPStatus.UNPROCESSABLE_ENTITY, "bad-request", str(error)) from None

    def inventory(self, call: Call) -> Reply:
        return Reply(ssh.inventory(self.held(call)))

    def certificate(self, call: Call) -> Reply:
        config, lease = self._config(), self.held(call)
        if config is None or config.access.certificates is None:
            text = "This launcher signs no certificates: access: certificates is not configured"
            raise Refused(http.HTTPStatus.NOT_FOUND, "no-certificates", text)
        try:
            with refusals():
                signed = certificates.sign(
                    config.access.certificates.key,
                    call.parsed(NewCertificate).public_key,
                    lease,
                    self._now,
                    self._zk().cluster.id,
                )
        except OSError as error:
            log.error("Lease %s: no certificate: %s", lease.id, error)
            text = "The certificate cannot be signed, see the log of the launcher"
            raise Refused(http.HTTPStatus.INTERNAL_SERVER_ERROR, "internal", text) from error
        return Reply(Certificate(signed, utc(lease.ends or 0.0)))

    # -- views

    def view(
        self,
        lease: Lease,
        identity: Identity,
        token: str | None = None,
        order: dict[str, int] | None = None,
        kills: Sequence[Event] = (),
    ) -> LeaseView:
        terms, full = lease.terms, _may_use(identity, lease)
        nodes = {(node.id, node.provider) for node in lease.nodes}
        return LeaseView(
            lease.id,
            lease.state.value,
            terms.owner,
            terms.purpose,
            lease.tenant,
            list(lease.labels),
            utc(terms.created),
            None if lease.ends is None else utc(lease.ends),
            terms.renewed,
            lease.lost,
            dict(terms.notes) if full else {},
            [_node_view(node, full) for node in lease.nodes],
            None if lease.nodes else self._why(lease, order),
            terms.limit,
            self._drained(lease),
            [_kill_view(each, self._now()) for each in kills if place_of(each) in nodes][
                -MOST_KILLS:
            ],
            token,
        )

    def _kills(self, leases: Sequence[Lease]) -> Sequence[Event]:
        """Return the kills for memory on the nodes of leases, by time.

        Those that another launcher has noted are in the history only.
        """
        zk, held = self._zk(), [lease for lease in leases if lease.nodes]
        nodes = {(node.id or "", node.provider) for lease in held for node in lease.nodes}
        if not nodes or not zk.connected:
            return []
        since = min(lease.terms.created for lease in held) - CLOCKS
        events = () if zk.feed is None else zk.feed.since(0)[0]
        recent = [event for event in events if event["type"] == KILLED]
        try:
            return kills_of(self._history, zk.kazoo_client, nodes, recent, since)
        except (KazooException, TimeoutError) as error:
            log.info("Kills for memory are not known: %r", error)
            return [event for event in recent if place_of(event) in nodes]

    def _drained(self, lease: Lease) -> str | None:
        zk = self._zk()
        drains = zk.readNotes(Drain)
        found = (of_node(drains, node, zk.getCachedNode) for node in lease.nodes)
        return shown(next(filter(None, found), None)) or None

    def _why(self, lease: Lease, order: dict[str, int] | None) -> Why | None:
        zk = self._zk()
        request = zk.getNodeRequest(lease.id, cached=True)
        if request is None:
            return None
        cause = causes.of_request(Once(zk), request)
        place = (places(zk.readRequests()) if order is None else order).get(lease.id)
        return Why(cause.text, cause.code or None, cause.remedy or None, place)


class _Poll(Later):
    """A call that waits until a lease leaves some states."""

    def __init__(
        self,
        calls: LeaseCalls,
        lease_id: str,
        deadline: float,
        identity: Identity,
        while_in: tuple[LeaseState, ...],
        token: str | None,
        created: http.HTTPStatus | None,
    ) -> None:
        """Create the call.

        :param created: the call has asked for the lease: its status when the lease is held.
        """
        self._calls = calls
        self._lease_id = lease_id
        self._deadline = deadline
        self._identity = identity
        self._while_in = while_in
        self._token = token
        self._created = created
        self._seen = False
        self._gone = 0.0

    async def outcome(self, share: Share) -> Reply:
        waiting, owner = self._calls.waiting, self._identity.owner
        places = waiting.places
        if places is None or not places.take(owner):
            last = await self._last(share)
            return dataclasses.replace(last, headers=(*last.headers, RETRY))
        try:
            found: Reply | None = None
            while found is None:
                # Unless its hand-over has ended since the lease was read: no event follows.
                if not self._expected or waiting.expects(self._lease_id):
                    await waiting.changed(
                        self._lease_id, self._since, self._deadline - self._calls.monotonic()
                    )
                found = await share.run(self.read)
            return found
        finally:
            places.free(owner)

    async def shortened(self, share: Share) -> Reply | None:
        # Only this answer has the token of a new lease: without it, nobody could return the lease.
        return None if self._created is None else await self._last(share)

    async def _last(self, share: Share) -> Reply:
        self._deadline = 0.0
        found = await share.run(self.read)
        assert found is not None, "its deadline has passed"
        return found

    def read(self) -> Reply | None:
        """Return the answer; None: nothing has changed, and the deadline is not reached."""
        self._since = self._calls.waiting.number
        now = self._calls.monotonic()
        self._expected = self._calls.waiting.expects(self._lease_id)
        if self._expected and now < self._deadline:
            return None  # it has not been handed over
        lease = self._calls.leases.get(self._lease_id)
        if lease is None:
            if self._calls.waiting.ended(self._lease_id) is None and self._seen:
                # The nodes of a request may be read a moment later than its end.
                self._gone = self._gone or now
                self._deadline = min(self._deadline, self._gone + GRACE)
                if now < self._deadline:
                    return None
            raise self._calls.ended(self._lease_id)
        if lease.state in self._while_in and now < self._deadline:
            self._seen = True
            return None
        status, headers = http.HTTPStatus.OK, _NO_HEADERS
        if self._created is not None:
            status = http.HTTPStatus.ACCEPTED if lease.state in OPEN else self._created
            headers = (("Location", f"/api/v1/leases/{lease.id}"),)
        return Reply(
            self._calls.view(lease, self._identity, self._token),
            status,
            headers,
            f"lease {lease.id}",
        )


def _node_view(node: Node, full: bool) -> NodeView:
    port = node.connection_port
    return NodeView(
        node.id or "",
        list(node.type),
        str(node.state),
        node.provider,
        node.az,
        node.interface_ip,
        node.username,
        [key for key in node.host_keys if isinstance(key, str)],
        node.connection_type,
        node.python_path,
        node.shell_type,
        node.attributes if isinstance(node.attributes, dict) else None,
        port if full or isinstance(port, int) else None,
    )


def _kill_view(event: Event, now: float) -> KillView:
    when = event["time"]
    return KillView(
        event["node"],
        event.get("pid", 0),
        one_line(event.get("program", "?")),
        event.get("memory_limit", 0),
        utc(when),
        round(max(0.0, now - when), 3),
    )


def _may_use(identity: Identity, lease: Lease) -> bool:
    """Return whether the caller holds the lease, or may act for its holder."""
    if identity.lease is not None:
        return identity.lease == lease.id
    if identity.role >= Role.OPERATE:
        return True
    return (
        identity.role >= Role.BORROW
        and identity.owner == lease.terms.owner
        and lease.terms.via != "record"
    )


def _forbidden(code: str, text: str) -> Refused:
    return Refused(http.HTTPStatus.FORBIDDEN, code, text)


def _checked_notes(
    notes: dict[str, str | int | float | bool | None],
) -> dict[str, str | int | float | bool | None]:
    size = len(msgspec.json.encode(notes))
    if size > MOST_NOTES:
        raise Refused(
            http.HTTPStatus.UNPROCESSABLE_ENTITY,
            "bad-request",
            f"notes have {size} bytes as JSON; at most {MOST_NOTES} are allowed",
        )
    return notes


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= LONGEST_WAIT:
        raise Refused(
            http.HTTPStatus.UNPROCESSABLE_ENTITY,
            "bad-request",
            f"wait must be seconds from 0 to {LONGEST_WAIT:g}",
        )
    return seconds


def utc(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(min(max(seconds, 0.0), 1e11), datetime.UTC)
