"""Calls of operators: nodes, requests, images, uploads."""

from __future__ import annotations

import datetime
import http
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from kazoo.exceptions import KazooException, NoNodeError

from nodepool.access.identity import Role
from nodepool.exceptions import TimeoutException, ZKException, ZKLockException
from nodepool.lease import Terms, record
from nodepool.status.drains import known_names, of_label, remaining
from nodepool.status.once import Once
from nodepool.status.results import format_duration
from nodepool.web.actions.bodies import (
    BuildChange,
    DrainList,
    DrainView,
    ImageChange,
    LeaseView,
    NewDrain,
    NewHold,
    NodeChange,
    UploadChange,
)
from nodepool.web.actions.leases import LeaseCalls, refusals
from nodepool.web.actions.routes import Call, Refused, Reply, Route
from nodepool.zk import paths
from nodepool.zk.drains import KINDS, Drain, shown
from nodepool.zk.mirror import notes
from nodepool.zk.records import DELETING, HOLD, Node
from nodepool.zk.zookeeper import ZooKeeper

#: Seconds to wait for the lock of a node.
LOCK = 5.0


class OperatorCalls:
    """The calls that need the role ``operate``."""

    def __init__(
        self, zk: Callable[[], ZooKeeper], leases: LeaseCalls, now: Callable[[], float] = time.time
    ) -> None:
        self._zk = zk
        self._leases = leases
        self._now = now

    def routes(self) -> list[Route]:
        ok, accepted, empty = (
            http.HTTPStatus.OK,
            http.HTTPStatus.ACCEPTED,
            http.HTTPStatus.NO_CONTENT,
        )
        image, operate = "image {image}", Role.OPERATE
        return [
            Route(
                "POST",
                "/nodes/{id}/hold",
                self.hold,
                "Lease a ready or held node to yourself",
                operate,
                {http.HTTPStatus.CREATED: LeaseView},
                NewHold,
                target="node {id}",
            ),
            Route(
                "DELETE",
                "/nodes/{id}",
                self.delete,
                "Delete a node",
                operate,
                {accepted: NodeChange},
                target="node {id}",
                query={"force": "true: although somebody has leased it"},
            ),
            Route(
                "DELETE",
                "/requests/{id}",
                self.cancel,
                "Cancel a request",
                operate,
                {empty: None},
                target="request {id}",
            ),
            Route(
                "GET", "/drains", self.drains, "List what is drained", Role.READ, {ok: DrainList}
            ),
            Route(
                "PUT",
                "/drains/{kind}/{name}",
                self.drain,
                "Drain a provider, pool, host, image, label or launcher",
                operate,
                {ok: DrainView},
                NewDrain,
                target="{kind} {name}",
            ),
            Route(
                "DELETE",
                "/drains/{kind}/{name}",
                self.undrain,
                "End a drain",
                operate,
                {empty: None},
                target="{kind} {name}",
            ),
            Route(
                "POST",
                "/images/{image}/build",
                self.build,
                "Request the build of an image",
                operate,
                {accepted: ImageChange},
                target=image,
            ),
            Route(
                "POST",
                "/images/{image}/pause",
                self.pause,
                "Stop building an image",
                operate,
                {ok: ImageChange},
                target=image,
            ),
            Route(
                "POST",
                "/images/{image}/resume",
                self.resume,
                "Build a paused image again",
                operate,
                {ok: ImageChange},
                target=image,
            ),
            Route(
                "DELETE",
                "/images/{image}/builds/{build}",
                self.delete_build,
                "Delete a build with its uploads",
                operate,
                {accepted: BuildChange},
                target="build {image}-{build}",
            ),
            Route(
                "DELETE",
                "/images/{image}/builds/{build}/providers/{provider}/uploads/{upload}",
                self.delete_upload,
                "Delete an upload",
                operate,
                {accepted: UploadChange},
                target="upload {image}-{build} {provider} {upload}",
            ),
        ]

    # -- drains

    def drains(self, _call: Call) -> Reply:
        zk = Once(self._zk())
        found = [self._view(each) for each in zk.readNotes(Drain)]
        offered = {label for pool in zk.getRegisteredPools() for label in pool.labels}
        why = {label: shown(of_label(zk, label)) for label in sorted(offered)} if found else {}
        return Reply(DrainList(found, {label: text for label, text in why.items() if text}))

    def _view(self, drain: Drain) -> DrainView:
        since, until = (
            None if each is None else datetime.datetime.fromtimestamp(each, datetime.UTC)
            for each in (drain.since, drain.until)
        )
        assert since is not None
        left = len(remaining(Once(self._zk()), drain))
        return DrainView(
            drain.kind, drain.target, since, until, drain.by, drain.reason, drain.keep_idle, left
        )

    def drain(self, call: Call) -> Reply:
        kind, name, body, now = (
            call.names["kind"],
            call.names["name"],
            call.parsed(NewDrain),
            self._now(),
        )
        if kind not in KINDS or name not in known_names(self._zk(), kind):
            raise Refused(
                http.HTTPStatus.NOT_FOUND, "not-found", f"No running launcher has {kind} {name}"
            )
        until = None if body.seconds is None else now + body.seconds
        for old in self._zk().readNotes(Drain):
            now = old.since if old.name == f"{kind} {name}" else now
        found = Drain(kind, name, now, until, body.reason, call.identity.owner, body.keep_idle)
        notes.write(self._zk().kazoo_client, found)
        return Reply(self._view(found))

    def undrain(self, call: Call) -> Reply:
        name = f"{call.names['kind']} {call.names['name']}"
        drains = {each.name: each for each in self._zk().readNotes(Drain)}
        if name not in drains or not notes.remove(self._zk().kazoo_client, drains[name]):
            raise Refused(http.HTTPStatus.NOT_FOUND, "not-found", f"{name} is not drained")
        return Reply(None, http.HTTPStatus.NO_CONTENT)

    # -- nodes and requests

    @contextmanager
    def _locked(self, node_id: str) -> Iterator[Node]:
        """Lock a node and read it.

        :raises Refused: it does not exist (404), or is in use (409).
        """
        zk = self._zk()
        node = zk.getNode(node_id.zfill(10) if node_id.isdecimal() else node_id)
        if node is None:
            raise Refused(http.HTTPStatus.NOT_FOUND, "not-found", f"Node {node_id} does not exist")
        try:
            zk.lockNode(node, blocking=True, timeout=LOCK)
        except (TimeoutException, ZKLockException) as error:
            text = f"Node {node.id} is {node.state} and locked by somebody else: {error}"
            raise Refused(http.HTTPStatus.CONFLICT, "unavailable", text) from error
        try:
            yield node
        except ZKException as error:
            # Somebody has deleted it meanwhile, with its lock.
            raise Refused(
                http.HTTPStatus.CONFLICT, "unavailable", f"Node {node.id} has changed: {error}"
            ) from error
        finally:
            with suppress(KazooException, ZKException):
                zk.unlockNode(node)

    def hold(self, call: Call) -> Reply:
        identity, body = call.identity, call.parsed(NewHold)
        with self._locked(call.names["id"]) as node, refusals():
            lease = self._leases.leases.hold(
                node, Terms(identity.owner, identity.via, body.purpose), body.seconds
            )
            return Reply(self._leases.view(lease, identity), http.HTTPStatus.CREATED)

    def delete(self, call: Call) -> Reply:
        with self._locked(call.names["id"]) as node:
            terms = Terms.read(node.user_data) if node.state == HOLD else None
            if terms is not None and call.query.get("force") != "true":
                end = record.end_of(node)
                left = (
                    "without an end"
                    if end is None
                    else f"for another {format_duration(end - self._now())}"
                )
                text = (
                    f"{terms.owner} has leased node {node.id} {left}; to delete it in any case, "
                    "use force=true"
                )
                raise Refused(http.HTTPStatus.CONFLICT, "leased", text)
            node.state = DELETING
            self._zk().storeNode(node)
            return Reply(NodeChange(node.id or "", DELETING), http.HTTPStatus.ACCEPTED)

    def cancel(self, call: Call) -> Reply:
        try:
            self._zk().kazoo_client.delete(paths.request(call.names["id"]))
        except NoNodeError:
            text = f"Request {call.names['id']} does not exist"
            raise Refused(http.HTTPStatus.NOT_FOUND, "not-found", text) from None
        return Reply(None, http.HTTPStatus.NO_CONTENT)

    # -- images

    def _image(self, call: Call) -> str:
        """Return the name of an image that exists.

        :raises Refused: it does not (404).
        """
        name = call.names["image"]
        if name not in self._zk().getImageNames():
            raise Refused(
                http.HTTPStatus.NOT_FOUND,
                "not-found",
                f"No builder has image {name}; GET /api/v1/images lists them",
            )
        return name

    def build(self, call: Call) -> Reply:
        name = self._image(call)
        if self._zk().getImagePaused(name):
            raise Refused(
                http.HTTPStatus.CONFLICT, "paused", f"Image {name} is paused; resume it first"
            )
        self._zk().submitBuildRequest(name)
        return Reply(ImageChange(name, "requested"), http.HTTPStatus.ACCEPTED)

    def pause(self, call: Call) -> Reply:
        name = self._image(call)
        self._zk().setImagePaused(name, True)
        return Reply(ImageChange(name, "paused"))

    def resume(self, call: Call) -> Reply:
        name = self._image(call)
        self._zk().setImagePaused(name, False)
        return Reply(ImageChange(name, "resumed"))

    def delete_build(self, call: Call) -> Reply:
        return Reply(BuildChange(self._delete(call, "build"), DELETING), http.HTTPStatus.ACCEPTED)

    def delete_upload(self, call: Call) -> Reply:
        return Reply(UploadChange(self._delete(call, "upload"), DELETING), http.HTTPStatus.ACCEPTED)

    def _delete(self, call: Call, kind: str) -> str:
        """Let builders delete a build or an upload; return its name.

        :raises Refused: it does not exist (404), or a builder is working on it (409).
        """
        names = [
            call.names[key] for key in ("image", "build", "provider", "upload") if key in call.names
        ]
        name, found = "/".join(names), self._zk().markDeleting(*names)
        if found is None:
            raise Refused(http.HTTPStatus.NOT_FOUND, "not-found", f"There is no {kind} {name}")
        if found != DELETING:
            raise Refused(
                http.HTTPStatus.CONFLICT,
                "unavailable",
                f"The {kind} {name} is {found}; try again later",
            )
        return name
