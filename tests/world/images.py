"""The invariants of builds and uploads."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from tests.world import builders

if TYPE_CHECKING:
    from tests.world.world import World

IMAGES, PROGRESS = "/nodepool/images/", "/nodepool/image-progress/"
#: State transitions; from `deleting` and from an abandoned `uploading` records are deleted. A
#: builder that has lost its session stores its build although others have removed the record as
#: abandoned, and it stores a result twice when it did not hear that it has been stored.
LEGAL_BUILDS = {
    None: {"building"},
    "building": {"ready", "failed", "deleting"},
    "ready": {"ready", "deleting"},
    "failed": {"failed", "deleting"},
    "deleting": {"deleting", "ready", "failed"},
    "deleted": {"ready", "failed"},
}
LEGAL_UPLOADS = {
    None: {"uploading"},
    "uploading": {"ready", "failed", "deleting"},
    "ready": {"ready", "deleting"},
    "failed": {"failed", "deleting"},
    "deleting": {"deleting", "failed"},
    "deleted": {"failed", "deleting"},
}
#: A failed one was marked for deletion before its builder stored the result.
DELETED_FROM = {"deleting", "uploading", "failed"}
#: Seconds until all builders have seen what an operator does.
SEEN = 30.0
#: Builds and uploads that are kept, besides those that a kept one needs.
KEPT = 2
#: Seconds without faults that a build or an upload waits or takes, if nothing else has to be done
#: before.
LONGEST_BUILD, LONGEST_UPLOAD = 4.0, 4.0


def _newest(records: dict[str, dict[str, Any]]) -> list[str]:
    """The paths of the ready ones, newest first."""
    ready = [path for path, record in records.items() if record["state"] == "ready"]
    return sorted(ready, key=lambda path: (records[path]["state_time"], path), reverse=True)


def _mark(upload: dict[str, Any]) -> dict[str, Any]:
    """Why launchers do not use an upload that was to be verified; empty: they do."""
    mark: dict[str, Any] = upload.get("rolled_back") or {}
    return mark if mark.get("by") == "verification" and not mark.get("undone") else {}


class ImageObserver:
    """Sees each change below ``/nodepool/images``."""

    def __init__(self, world: World) -> None:
        self._world = world
        #: Records by path.
        self.builds: dict[str, dict[str, Any]] = {}
        self.uploads: dict[str, dict[str, Any]] = {}
        #: Paths that had records.
        self._deleted: set[str] = set()
        #: The record that is being replaced.
        self._before: dict[str, Any] | None = None
        #: When the operator deleted something of an image.
        self._operated: dict[str, float] = {}
        #: When an image has to be built, when it was, and since when a build has to be uploaded.
        self._due = dict.fromkeys(world.scenario.images.ages, 0.0)
        self._built: dict[str, float] = {}
        self._unsent: dict[tuple[str, str], float] = {}
        #: Uploads in the order in which they became ready.
        self._finished: list[str] = []
        #: Called once, at the next change that a builder makes, with its name.
        self.strikes: list[Any] = []

    # -- transactions

    def changed(self, change: list[Any]) -> None:
        kind, path = change[0], change[1]
        if not isinstance(path, str) or not path.startswith(IMAGES):
            return
        parts = path.removeprefix(IMAGES).split("/")
        if parts[1:] == ["request-build"] or parts[1:] == ["pause"]:
            self._flag(kind, parts[0], parts[1])
        elif len(parts) == 3 and parts[1] == "builds" and parts[2] != "lock":
            self._record(self.builds, LEGAL_BUILDS, kind, path, change)
        elif len(parts) == 7 and parts[5] == "images" and parts[6] != "lock":
            self._record(self.uploads, LEGAL_UPLOADS, kind, path, change)

    def _flag(self, kind: str, image: str, flag: str) -> None:
        now = self._world.kernel.now
        self._world.note("image", f"{image} {kind} {flag}")
        if flag == "pause" and kind == "delete":
            requested = f"{IMAGES}{image}/request-build" in self._world.zookeeper.server.tree.nodes
            self._due[image] = now if requested else max(now, self._due[image])
        elif flag == "request-build" and kind == "create":
            self._due[image] = min(now, self._due[image])
        elif flag == "request-build":
            # Served by the build that became ready just before.
            self._due[image] = self._built.get(image, now) + self._world.scenario.images.ages[image]

    def _paused(self, image: str) -> bool:
        return f"{IMAGES}{image}/pause" in self._world.zookeeper.server.tree.nodes

    def _overdue(self, image: str) -> bool:
        """Whether the image should have been built by now, without faults."""
        world = self._world
        return (
            world.scenario.quiet
            and not self._paused(image)
            and world.kernel.now - self._due[image] > (1 + len(self._due)) * LONGEST_BUILD
        )

    def _record(
        self,
        records: dict[str, dict[str, Any]],
        legal: dict[str | None, set[str]],
        kind: str,
        path: str,
        change: list[Any],
    ) -> None:
        world, before = self._world, records.get(path)
        old = before["state"] if before else "deleted" if path in self._deleted else None
        if kind == "delete":
            if records.pop(path, None) is not None:
                self._deleted.add(path)
                world.note("image", f"{path} deleted, was {old}")
                if old not in DELETED_FROM:
                    world.violated(f"{path} was deleted in state {old}")
            return
        if not change[2]:
            return
        record = json.loads(change[2])
        state = record["state"]
        if old == "ready" and state == "deleting":
            self._given_up(records, path)
        self._before, records[path] = before, record
        if before is not None and before.get("external_id") and not record.get("external_id"):
            world.violated(f"{path} has lost its image {before['external_id']}")
        writer = world.zookeeper.writer
        world.note(
            "image", f"{path} {old} -> {state} {record.get('external_id') or ''} by {writer}"
        )
        if state not in legal.get(old, ()):
            world.violated(f"{path} went from {old} to {state}")
        if records is self.builds:
            self._build(path, old, record)
        else:
            self._upload(path, old, record)
        if self.strikes and writer.startswith("builder"):
            self.strikes.pop(0)(writer)

    def _given_up(self, records: dict[str, dict[str, Any]], path: str) -> None:
        """A ready build or upload is being deleted; builders keep the newest one."""
        parts, writer, now = path.split("/"), self._world.zookeeper.writer, self._world.kernel.now
        if writer == "operator":
            self._operated[parts[3]] = now
        alike = {
            other: record
            for other, record in records.items()
            if other.split("/")[3] == parts[3] and other.split("/")[7:8] == parts[7:8]
        }
        if (
            records is self.uploads
            and self.builds.get("/".join(parts[:6]), {}).get("state") == "deleting"
        ):
            return  # together with its build
        if _newest(alike)[:1] == [path] and now - self._operated.get(parts[3], -100.0) > SEEN:
            self._world.violated(f"{writer} deletes {path}, which is the newest one")

    def _build(self, path: str, old: str | None, record: dict[str, Any]) -> None:
        world, now = self._world, self._world.kernel.now
        if record["state"] in ("building", "ready") and not self._holds(
            f"{path.rpartition('/')[0]}/lock"
        ):
            world.violated(
                f"{world.zookeeper.writer} set {path} to {record['state']} without the lock of the "
                "image"
            )
        if record["state"] == "ready":
            image = path.removeprefix(IMAGES).split("/")[0]
            if self._overdue(image):
                world.violated(f"{path} is ready {now - self._due[image]:.1f} s after it was due")
            self._built[image] = now
            self._due[image] = now + world.scenario.images.ages[image]
            for name in self._providers():
                self._unsent[path, name] = now

    def _upload(self, path: str, old: str | None, record: dict[str, Any]) -> None:
        world = self._world
        verified = world.scenario.images.verified
        builder = world.zookeeper.writer.startswith("builder")
        if old == "ready" == record["state"] and (verified or not builder):
            self._rolled(path, record)
            return
        if record["state"] in ("uploading", "ready") and not self._holds(
            f"{path.rpartition('/')[0]}/lock"
        ):
            world.violated(
                f"{world.zookeeper.writer} set {path} to {record['state']} without the lock of the "
                "upload"
            )
        if record["state"] != "ready":
            return
        self._finished.append(path)
        directory = path.rpartition("/")[0]
        for other, theirs in self.uploads.items():
            if (
                other != path
                and other.rpartition("/")[0] == directory
                and theirs["state"] == "ready"
            ):
                world.violated(f"{path} and {other} are both ready")
        if not any(record["external_id"] in cloud.images for cloud in world.image_clouds):
            world.violated(f"{path} is ready, but there is no image {record['external_id']}")
        parts = path.split("/")
        since = self._unsent.pop(("/".join(parts[:6]), parts[7]), None)
        longest = (1 + len(self._due) * len(self._providers())) * LONGEST_UPLOAD
        if since is not None and world.scenario.quiet and world.kernel.now - since > longest:
            world.violated(f"{path} is ready {world.kernel.now - since:.1f} s after its build")

    def _rolled(self, path: str, record: dict[str, Any]) -> None:
        """A roll-back changes only which upload is the newest one, and notes why."""
        same = [
            {key: value for key, value in each.items() if key not in ("state_time", "rolled_back")}
            for each in (record, self._before or {})
        ]
        if same[0] != same[1]:
            self._world.violated(f"{path} is ready and has changed: {self._before} -> {record}")

    def _holds(self, directory: str) -> bool:
        """Whether the session that writes now holds the lock."""
        nodes = self._world.zookeeper.server.tree.nodes
        names = self._contenders(directory)
        return (
            bool(names) and nodes[f"{directory}/{names[0]}"].owner == self._world.zookeeper.session
        )

    def _contenders(self, directory: str) -> list[str]:
        node = self._world.zookeeper.server.tree.nodes.get(directory)
        return sorted(node.children if node else (), key=lambda child: child.rpartition("__")[2])

    def _providers(self) -> list[str]:
        """Those that shall have all images."""
        return [
            f"provider-{number}"
            for number, each in enumerate(self._world.scenario.providers)
            if "images" in each
        ]

    # -- clouds

    def gone(self, image_id: str) -> None:
        """A driver has deleted an image."""
        self._world.note("cloud", f"delete {image_id}")
        for path, record in self.uploads.items():
            if record.get("external_id") == image_id and record["state"] == "ready":
                self._world.violated(f"{image_id} was deleted although {path} is ready")

    def at_end(self) -> None:
        for cloud in self._world.image_clouds if self._world.scenario.quiet else ():
            if cloud.imageless:
                self._world.violated(
                    f"{cloud.imageless} machines were asked for at {cloud.name} with images that "
                    "do not exist"
                )

    # -- at rest

    def available(self, label: str) -> bool:
        """Whether the label needs no disk image, or has one: an operator may have paused it and
        deleted all uploads.
        """
        image = label.removesuffix("-node")
        return image not in self._due or any(
            path.startswith(f"{IMAGES}{image}/") and not _mark(self.uploads[path])
            for path in _newest(self.uploads)
        )

    def at_rest(self) -> list[str]:
        wrong: list[str] = []
        if not self._world.scenario.images.builders:
            return wrong
        for image in self._world.scenario.images.ages:
            wrong += self._image(image)
        known = {record.get("external_id") for record in self.uploads.values()}
        for cloud in self._world.image_clouds:
            wrong += [
                f"{image.id} belongs to no upload"
                for image in cloud.images.values()
                if image.id not in known
            ]
        wrong += [f"{image} should have been built" for image in self._due if self._overdue(image)]
        wrong += [
            f"{builder.name} has not read its configuration"
            for builder in self._world.builders
            if self._outdated(builder)
        ]
        wrong += self._tree()
        for number in range(1, self._world.scenario.images.builders + 1):
            wrong += self._files(f"builder-{number}")
        wrong += [f"{builders.TEMPORARY}/{name} is left" for name in os.listdir(builders.TEMPORARY)]
        wrong += [
            f"program {pid} of {each.builder} runs"
            for pid, each in builders.machine.programs.items()
        ]
        return wrong

    def _outdated(self, builder: builders.Builder) -> bool:
        if builder.service is None:
            return True
        images = builder.service.state.config.diskimages
        return any(
            images[name].rebuild_age != age
            for name, age in self._world.scenario.images.ages.items()
        )

    def _image(self, image: str) -> list[str]:
        prefix = f"{IMAGES}{image}/"
        found = {path: record for path, record in self.builds.items() if path.startswith(prefix)}
        uploads = {path: record for path, record in self.uploads.items() if path.startswith(prefix)}
        records = [*found.items(), *uploads.items()]
        wrong = [
            f"{path} is {record['state']}" for path, record in records if record["state"] != "ready"
        ]
        kept = _newest(found)[:KEPT]
        if not kept:
            return wrong if self._paused(image) else [*wrong, f"there is no build of {image}"]
        recent: list[str] = []
        for name in self._providers():
            theirs = {
                path: record for path, record in uploads.items() if path.split("/")[7] == name
            }
            recent += _newest(theirs)[:KEPT]
            if not self._uploaded(kept[0], name) and self._has_file(kept[0]):
                wrong.append(f"{kept[0]} is not uploaded to {name}")
        needed = kept + ["/".join(path.split("/")[:6]) for path in recent]
        wrong += [f"{path} is not needed any more" for path in found if path not in needed]
        wrong += [
            f"{path} is not needed any more"
            for path in uploads
            if path not in recent and not any(path.startswith(f"{build}/") for build in kept)
        ]
        images = {
            image.id: image for cloud in self._world.image_clouds for image in cloud.images.values()
        }
        for path, record in uploads.items():
            there = images.get(record.get("external_id") or "")
            if there is None or not there.ready:
                wrong.append(f"{path} is ready, but its image is not: {there}")
        for name in self._providers():
            # It replaces others that wait.
            latest = [
                path for path in self._finished if path in uploads and path.split("/")[7] == name
            ][-1:]
            wrong += [
                f"{path} is not verified"
                for path in latest
                if _mark(uploads[path]).get("unverified")
            ]
        return wrong

    def _tree(self) -> list[str]:
        """What is in ZooKeeper besides the records."""
        wrong = []
        for path, node in self._world.zookeeper.server.tree.nodes.items():
            if path.startswith(IMAGES):
                parts = path.removeprefix(IMAGES).split("/")
                if "__lock__" in parts[-1]:
                    wrong.append(f"{path} is held")
                elif parts[1:] == ["request-build"] and not self._paused(parts[0]):
                    wrong.append(f"{path} is not served")
                elif (
                    len(parts) in (3, 7)
                    and parts[-1] != "lock"
                    and not node.data
                    and parts[-1] != "providers"
                ):
                    wrong.append(f"{path} is empty")
            elif path.startswith(f"{PROGRESS}uploads/"):
                wrong.append(f"{path} is left")
            elif path.startswith(f"{PROGRESS}builds/"):
                record = json.loads(node.data or b"{}")
                if record.get("state") == "building" or (
                    record.get("state") == "ready" and not self._build_exists(record)
                ):
                    wrong.append(f"{path} is left: {record.get('state')}")
        return wrong

    def _build_exists(self, progress: dict[str, Any]) -> bool:
        return f"{IMAGES}{progress['image']}/builds/{progress['build']}" in self.builds

    def _files(self, builder: str) -> list[str]:
        """What is on the disk of a builder."""
        wanted = {"builder_id.txt", ".builds", ".uploads"}
        optional: set[str] = {".uploads"}
        for path, record in self.builds.items():
            if record["builder"] != f"{builder}.example.org" or record["state"] != "ready":
                continue
            parts = path.split("/")
            base = f"{parts[3]}-{parts[5]}"
            files = {f"{base}.qcow2", f"{base}.qcow2.md5", f"{base}.qcow2.sha256"}
            wanted |= {f"{base}.d"}
            if not self._world.scenario.images.thrifty:
                wanted |= files
            elif not all(self._uploaded(path, name) for name in self._providers()):
                optional |= files
        directory = f"{builder}/images"
        there = set(os.listdir(directory))
        wrong = [f"{directory}/{name} is left" for name in sorted(there - wanted - optional)]
        wrong += [f"{directory}/{name} is missing" for name in sorted(wanted - optional - there)]
        for name, known in ((".builds", ["lock"]), (".uploads", [])):
            if name in there:
                wrong += [
                    f"{directory}/{name}/{each} is left"
                    for each in os.listdir(f"{directory}/{name}")
                    if each not in known
                ]
        return wrong

    def _has_file(self, build: str) -> bool:
        parts = build.split("/")
        builder = self.builds[build]["builder"].partition(".")[0]
        return (
            os.path.exists(f"{builder}/images/{parts[3]}-{parts[5]}.qcow2")
            or not self._world.scenario.images.thrifty
        )

    def _uploaded(self, build: str, provider: str) -> bool:
        prefix = f"{build}/providers/{provider}/"
        return any(
            path.startswith(prefix) and record["state"] == "ready"
            for path, record in self.uploads.items()
        )
