"""``export-image-data`` and ``import-image-data`` (BLD-18)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import NodeExistsError, NoNodeError

from nodepool import status
from nodepool.base.files import new_file
from nodepool.cmd.commands.context import CommandError, Context, Subparsers, add_command
from nodepool.cmd.commands.images import report
from nodepool.process.program import absolute_path
from nodepool.zk import paths

log = logging.getLogger("nodepool.cmd.image_data")

READ_TIMEOUT = 60.0
UPLOAD = re.compile(rf"({paths.IMAGES}/[^/]+/builds/[^/]+/providers/[^/]+/images)/(\d{{10}})\Z")
RECORD = re.compile(rf"{paths.IMAGES}/[^/]+/(pause|builds/[^/]+)\Z")


def register(subparsers: Subparsers) -> None:
    for name, function, text in (
        ("export-image-data", export_image_data, "write the records of all images to a file"),
        ("import-image-data", import_image_data, "restore the records of images; daemons must be stopped"),
    ):
        parser = add_command(subparsers, name, function, text)
        parser.add_argument("path", metavar="PATH", type=absolute_path, help="file")
        parser.add_argument("--format", choices=status.FORMATS, help="print the result in this format")
        if function is export_image_data:
            parser.add_argument("--force", action="store_true", help="replace an existing file")


def _children(kazoo: KazooClient, parents: Iterable[str]) -> list[str]:
    """Yield the paths of all children of all parents, read concurrently."""
    asked = [(parent, kazoo.get_children_async(parent)) for parent in parents]
    result = []
    for parent, answer in asked:
        try:
            result += [f"{parent}/{name}" for name in answer.get(timeout=READ_TIMEOUT)]
        except NoNodeError:
            continue
    return sorted(result)


def _data(kazoo: KazooClient, names: Iterable[str]) -> dict[str, str]:
    asked = [(path, kazoo.get_async(path)) for path in names]
    result = {}
    for path, answer in asked:
        try:
            data, _ = answer.get(timeout=READ_TIMEOUT)
        except NoNodeError:
            continue
        try:
            result[path] = (data or b"").decode("utf-8")
        except UnicodeDecodeError:
            log.warning("Ignoring %s: it is not text", path)
    return result


def _without_locks(names: Iterable[str]) -> list[str]:
    return [path for path in names if not path.endswith("/lock")]


def read_records(kazoo: KazooClient) -> dict[str, str]:
    """Return path -> text of pause flags, builds and uploads, without locks and requests."""
    images = _children(kazoo, [paths.IMAGES])
    pauses = [path for path in _children(kazoo, images) if path.endswith("/pause")]
    builds = _without_locks(_children(kazoo, [f"{image}/builds" for image in images]))
    providers = _children(kazoo, [f"{build}/providers" for build in builds])
    uploads = _without_locks(_children(kazoo, [f"{provider}/images" for provider in providers]))
    records = {path: text for path, text in _data(kazoo, [*builds, *uploads]).items() if text}
    strange = [path for path in records if not (UPLOAD.match(path) or RECORD.match(path))]
    for path in strange:
        log.warning("Ignoring %s: it is not a record of a build or an upload", path)
        del records[path]
    return {**dict.fromkeys(pauses, ""), **records}


def export_image_data(context: Context) -> None:
    path, force = context.args.path, context.args.force
    _check_target(path, force)
    records = read_records(context.kazoo)
    # Private: mode 0600.
    with new_file(path, place=os.replace if force else _place) as stream:
        stream.write(json.dumps(records).encode())
        stream.flush()
        _verify(stream.name, records)
    report(context, _summary(path, records))


def _summary(path: str, records: dict[str, str]) -> dict[str, Any]:
    uploads = sum(1 for name in records if UPLOAD.match(name))
    pauses = sum(1 for name in records if name.endswith("/pause") and name.count("/") == 4)
    return {"path": path, "builds": len(records) - uploads - pauses, "uploads": uploads, "paused": pauses}


def _is_empty_file(path: str) -> bool:
    found = os.lstat(path)
    return stat.S_ISREG(found.st_mode) and found.st_size == 0


def _check_target(path: str, force: bool) -> None:
    """Check the target before the cluster is read.

    :raises CommandError: it exists and must not, or cannot, be replaced.
    """
    if not os.path.lexists(path):
        return
    if not (os.path.isfile(path) or os.path.islink(path)):
        raise CommandError(f"{path} exists and is not a file")
    # An empty file (``mktemp``) has no content to lose.
    if not force and not _is_empty_file(path):
        raise CommandError(f"{path} exists; name another file, or replace it with --force")


def _place(temporary: str, path: str) -> None:
    """Move the file to its name, unless that exists by now."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        _check_target(path, False)
        os.replace(temporary, path)
    except OSError:  # file systems without hard links
        _check_target(path, False)
        os.replace(temporary, path)
    else:
        os.unlink(temporary)


def _verify(name: str, records: dict[str, str]) -> None:
    """Read the file back.

    :raises CommandError: its content differs from what was written.
    """
    with open(name, encoding="utf-8") as stream:
        found = parse_records(stream.read(), name)
    if found != records:
        raise CommandError(f"{name} differs from what was written to it; check the disk")


def parse_records(text: str, name: str) -> dict[str, str]:
    """Return the checked contents of an export file, before anything is written.

    :raises CommandError: the file is not an export.
    """
    try:
        records = json.loads(text)
    except ValueError as error:
        raise CommandError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(records, dict):
        raise CommandError(f"{name} does not contain a JSON object")
    for path, value in records.items():
        if not isinstance(value, str) or not (UPLOAD.match(path) or RECORD.match(path)):
            raise CommandError(f"{name}: unexpected entry {path!r}; is this a file from export-image-data?")
        if "/../" in f"{path}/" or "/./" in f"{path}/":
            raise CommandError(f"{name}: {path!r} is not a valid ZooKeeper path")
    return records


def _advance(kazoo: KazooClient, container: str, wanted: set[int]) -> None:
    """Create uploads up to the highest number, so that the next one gets a higher number."""
    kazoo.ensure_path(container)
    while True:
        try:
            path = kazoo.create(f"{container}/", b"", sequence=True)
        except NodeExistsError:
            # A child without a number was created here; every child increases the counter.
            kazoo.delete(kazoo.create(f"{container}/counter", b""))
            continue
        number = int(path[-10:])
        if number not in wanted:
            kazoo.delete(path)
        if number >= max(wanted):
            return


def running_daemons(kazoo: KazooClient) -> list[str]:
    """Return ``launcher HOST`` and ``builder HOST`` of all registered daemons."""
    found = set()
    for path, text in _data(kazoo, _children(kazoo, [f"{paths.COMPONENTS}/{kind}" for kind in ("builder", "launcher")])).items():
        with contextlib.suppress(ValueError, AttributeError):
            found.add(f"{path.split('/')[-2]} {json.loads(text).get('hostname')}")
    return sorted(found)


def import_image_data(context: Context) -> None:
    path = context.args.path
    try:
        with open(path, encoding="utf-8") as stream:
            records = parse_records(stream.read(), path)
    except UnicodeDecodeError as error:
        raise CommandError(f"{path} is not valid UTF-8: {error.reason}") from None
    kazoo = context.kazoo
    running = running_daemons(kazoo)
    if running:
        context.refuse(f"daemons are running, which may undo this: {', '.join(running)}; stop them and import again")
    containers: dict[str, set[int]] = defaultdict(set)
    for name in records:
        match = UPLOAD.match(name)
        if match:
            containers[match[1]].add(int(match[2]))
    for container, wanted in sorted(containers.items()):
        _advance(kazoo, container, wanted)
    for name, text in sorted(records.items()):
        try:
            kazoo.create(name, text.encode("utf-8"), makepath=True)
        except NodeExistsError:
            kazoo.set(name, text.encode("utf-8"))
    report(context, _summary(path, records))
