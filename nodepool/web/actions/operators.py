"""Calls of operators: nodes, requests, images, uploads."""

from __future__ import annotations

import http
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from kazoo.exceptions import KazooException, NoNodeError

from nodepool.access.identity import Role
from nodepool.exceptions import TimeoutException, ZKException, ZKLockException
from nodepool.lease import Terms, record
from nodepool.status.drains import known_names, of_label, remaining
from nodepool.status.once import Once
from nodepool.status.results import format_duration
from nodepool.status.rotations import left
from nodepool.web.actions.bodies import (
    BuildChange,
    DrainList,
    DrainView,
    ImageChange,
    LeaseView,
    NewDrain,
    NewHold,
    NewRollback,
    NewRollforward,
    NewRotation,
    NodeChange,
    RotationList,
    RotationView,
    SwitchList,
    SwitchView,
    UploadChange,
)
from nodepool.web.actions.leases import LeaseCalls, refusals, utc
from nodepool.web.actions.routes import Call, Refused, Reply, Route
from nodepool.zk import paths
from nodepool.zk.drains import Drain, shown
from nodepool.zk.mirror import notes
from nodepool.zk.records import DELETING, HOLD, Node
from nodepool.zk.rollback import Result, RollbackRefused, Rollbacks
from nodepool.zk.rotations import Rotation
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
                "GET",
                "/rotations",
                self.rotations,
                "List the rotations",
                Role.READ,
                {ok: RotationList},
            ),
            Route(
                "PUT",
                "/rotations/{kind}/{name}",
                self.rotate,
                "Replace the idle nodes of a label, image or provider",
                operate,
                {ok: RotationView},
                NewRotation,
                target="{kind} {name}",
            ),
            Route(
                "DELETE",
                "/rotations/{kind}/{name}",
                self.end_rotation,
                "Keep the idle nodes that are left",
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
                "POST",
                "/images/{image}/rollback",
                self.rollback,
                "Let launchers use the previous upload of an image",
                operate,
                {ok: SwitchList},
                NewRollback,
                target=image,
            ),
            Route(
                "POST",
                "/images/{image}/rollforward",
                self.rollforward,
                "Undo the last roll-back, or use an upload without verification",
                operate,
                {ok: SwitchList},
                NewRollforward,
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
        return DrainView(
            drain.kind,
            drain.target,
            utc(drain.since),
            drain.by,
            drain.reason,
            len(remaining(Once(self._zk()), drain)),
            None if drain.until is None else utc(drain.until),
            drain.keep_idle,
        )

    def _known(self, call: Call, kinds: Collection[str]) -> tuple[str, str]:
        """Return the kind and the name in the path.

        :raises Refused: the kind is not one of these, or no running launcher has it (404).
        """
        kind, name = call.names["kind"], call.names["name"]
        if kind not in kinds:
            text = f"{kind} must be one of {', '.join(kinds)}"
            raise Refused(http.HTTPStatus.NOT_FOUND, "not-found", text)
        if name not in known_names(self._zk(), kind):
            raise Refused(
                http.HTTPStatus.NOT_FOUND, "not-found", f"No running launcher has {kind} {name}"
            )
        return kind, name

    def _end(self, call: Call, record: type[notes.Note], is_so: str) -> Reply:
        """Delete the record of what the path names.

        :raises Refused: there is none (404).
        """
        name = f"{call.names['kind']} {call.names['name']}"
        found = {each.name: each for each in self._zk().readNotes(record)}
        if name not in found or not notes.remove(self._zk().kazoo_client, found[name]):
            raise Refused(http.HTTPStatus.NOT_FOUND, "not-found", f"{name} is not {is_so}")
        return Reply(None, http.HTTPStatus.NO_CONTENT)

    def drain(self, call: Call) -> Reply:
        (kind, name), body, now = self._known(call, Drain.KINDS), call.parsed(NewDrain), self._now()
        until = None if body.seconds is None else now + body.seconds
        for old in self._zk().readNotes(Drain):
            now = old.since if old.name == f"{kind} {name}" else now
        found = Drain(kind, name, now, body.reason, call.identity.owner, until, body.keep_idle)
        notes.write(self._zk().kazoo_client, found)
        return Reply(self._view(found))

    def undrain(self, call: Call) -> Reply:
        return self._end(call, Drain, "drained")

    # -- rotations

    def rotations(self, _call: Call) -> Reply:
        return Reply(
            RotationList([self._rotation(each) for each in self._zk().readNotes(Rotation)])
        )

    def _rotation(self, rotation: Rotation) -> RotationView:
        return RotationView(
            rotation.kind,
            rotation.target,
            utc(rotation.since),
            rotation.by,
            rotation.reason,
            len(left(Once(self._zk()), rotation)),
        )

    def rotate(self, call: Call) -> Reply:
        (kind, name), reason = self._known(call, Rotation.KINDS), call.parsed(NewRotation).reason
        found = Rotation(kind, name, self._now(), reason, call.identity.owner)
        kazoo = self._zk().kazoo_client
        notes.write(kazoo, found)
        # None: it has ended already, because no node is left.
        stat = kazoo.exists(notes.path(found))
        return Reply(self._rotation(replace(found, zxid=0 if stat is None else stat.mzxid)))

    def end_rotation(self, call: Call) -> Reply:
        return self._end(call, Rotation, "rotated")

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

    def rollback(self, call: Call) -> Reply:
        # Not the owner alone: its name could be that of what holds uploads back.
        body, by = call.parsed(NewRollback), f"user {call.identity.owner}"
        reason = body.reason or "no reason given"
        return self._switch(call, lambda each, image: each.back(image, body.provider, by, reason))

    def rollforward(self, call: Call) -> Reply:
        body = call.parsed(NewRollforward)
        return self._switch(call, lambda each, image: each.forward(image, body.provider))

    def _switch(self, call: Call, change: Callable[[Rollbacks, str], Result]) -> Reply:
        """Change the upload in use.

        :raises Refused: the image does not exist (404), or nothing was changed (409).
        """
        image = self._image(call)
        try:
            result = change(Rollbacks(self._zk(), self._now), image)
            others = result.others(image)
        except RollbackRefused as error:
            raise Refused(http.HTTPStatus.CONFLICT, "unavailable", str(error)) from error
        changed = [
            SwitchView(
                each.provider,
                str(each.used.build_id),
                str(each.used.id),
                None if each.before is None else str(each.before.build_id),
            )
            for each in result.changed
        ]
        return Reply(SwitchList(image, changed, others))

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
