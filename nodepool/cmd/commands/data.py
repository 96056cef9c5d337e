"""``export-image-data`` and ``import-image-data`` (BLD-18)."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from nodepool import status
from nodepool.base.files import replace_file
from nodepool.cmd.commands.context import CommandError, Context, Subparsers, add_command, add_format
from nodepool.cmd.commands.images import report
from nodepool.process.program import absolute_path
from nodepool.zk import paths

UPLOAD = re.compile(rf"({paths.IMAGES}/[^/]+/builds/[^/]+/providers/[^/]+/images)/(\d{{10}})\Z")
RECORD = re.compile(rf"{paths.IMAGES}/[^/]+/(pause|builds/[^/]+)\Z")


def register(subparsers: Subparsers) -> None:
    for name, function, text in (
        ("export-image-data", export_image_data, "write the records of all images to a file"),
        (
            "import-image-data",
            import_image_data,
            "restore the records of images; daemons must be stopped",
        ),
    ):
        parser = add_command(subparsers, name, function, text)
        parser.add_argument("path", metavar="PATH", type=absolute_path, help="file")
        add_format(parser, status.FORMATS, None, "print the result in this format")
        if function is export_image_data:
            parser.add_argument("--force", action="store_true", help="replace an existing file")


def _is_record(path: str) -> bool:
    return bool(UPLOAD.match(path) or RECORD.match(path))


def export_image_data(context: Context) -> None:
    path = context.args.path
    records = {
        name: text for name, text in context.zk.exportImageData().items() if _is_record(name)
    }
    _check_target(path, context.args.force)
    # Private: mode 0600.
    replace_file(path, json.dumps(records))
    report(context, _summary(path, records))


def _summary(path: str, records: dict[str, str]) -> dict[str, Any]:
    uploads = sum(1 for name in records if UPLOAD.match(name))
    pauses = sum(1 for name in records if name.endswith("/pause") and name.count("/") == 4)
    return {
        "path": path,
        "builds": len(records) - uploads - pauses,
        "uploads": uploads,
        "paused": pauses,
    }


def _check_target(path: str, force: bool) -> None:
    """Check that the file may be replaced.

    :raises CommandError: it exists and must not, or cannot, be replaced.
    """
    if not os.path.lexists(path):
        return
    if not (os.path.isfile(path) or os.path.islink(path)):
        raise CommandError(f"{path} exists and is not a file")
    # An empty file (``mktemp``) has no content to lose.
    if not force and (os.path.islink(path) or os.path.getsize(path)):
        raise CommandError(f"{path} exists; name another file, or replace it with --force")


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
        if not isinstance(value, str) or not _is_record(path):
            raise CommandError(
                f"{name}: unexpected entry {path!r}; is this a file from export-image-data?"
            )
        if "/../" in f"{path}/" or "/./" in f"{path}/":
            raise CommandError(f"{name}: {path!r} is not a valid ZooKeeper path")
    return records


def import_image_data(context: Context) -> None:
    path = context.args.path
    try:
        with open(path, encoding="utf-8") as stream:
            records = parse_records(stream.read(), path)
    except UnicodeDecodeError as error:
        raise CommandError(f"{path} is not valid UTF-8: {error.reason}") from None
    zk = context.zk
    running = sorted(
        {
            f"{each.get('kind')} {each.get('hostname')}"
            for each in [*zk.getBuilders(), *zk.getLaunchers()]
        }
    )
    if running:
        context.refuse(
            f"daemons are running, which may undo this: {', '.join(running)}; stop them and import "
            "again"
        )
    zk.importImageData(records)
    report(context, _summary(path, records))
