"""The audit log of commands, which write to ZooKeeper directly."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from kazoo.exceptions import KazooException

from nodepool.access import audit
from nodepool.access.identity import Identity, Role
from nodepool.base import hostnames
from nodepool.cmd.commands.context import CommandError, Context, user
from nodepool.exceptions import ZKException
from nodepool.zk import history
from nodepool.zk.drains import Drain
from nodepool.zk.rotations import Rotation

#: Command that changes something -> type of its objects (empty: the argument ``of``), and the
#: argument that names them.
AUDITED = {
    "delete": ("node", "ids"),
    "hold": ("node", "ids"),
    "erase": ("provider", "provider"),
    "recover": ("node", "ids"),
    "retry": ("label", "labels"),
    "request create": ("label", "labels"),
    "request cancel": ("request", "ids"),
    "request accept": ("request", "id"),
    "request return": ("request", "ids"),
    "lease get": ("label", "labels"),
    "lease renew": ("lease", "id"),
    "lease return": ("lease", "id"),
    "image-build": ("image", "image"),
    "image-pause": ("image", "image"),
    "image-unpause": ("image", "image"),
    "image-rollback": ("image", "image"),
    "image-rollforward": ("image", "image"),
    "image-delete": ("image", "image"),
    "dib-image-delete": ("build", "id"),
    "import-image-data": ("file", "path"),
    **{f"drain {kind}": (kind, "target") for kind in Drain.KINDS},
    "undrain": ("", "target"),
    **{f"rotate {kind}": (kind, "target") for kind in Rotation.KINDS},
    "rotate cancel": ("", "target"),
    "token create": ("token", "name"),
    "token revoke": ("token", "id"),
}


def run(context: Context) -> int:
    """Run the command, and record it if it changes something; return its exit status."""
    args = context.args
    if args.path not in AUDITED:
        return args.function(context) or 0
    result: str | None = "failed"
    try:
        status: int = args.function(context) or 0
        result = (
            f"status {status}" if status else "ok" if not context.refused else "refused, or in part"
        )
        return status
    except CommandError:
        result = None  # it was refused, and has changed nothing
        raise
    finally:
        if result is not None:
            _record(context, args.path, result)


def _record(context: Context, path: str, result: str) -> None:
    kind, argument = AUDITED[path]
    kind = kind or context.args.of
    given = getattr(context.args, argument, None)
    names = [given] if isinstance(given, str) else list(given or ())
    identity = Identity(user(), f"unix:{os.getuid()}", Role.ADMIN)
    for target in _targets(kind, names):
        audit.record(
            lambda event, **fields: _note(context, event, fields),
            identity,
            hostnames.short(),
            path,
            target,
            result,
        )


def _targets(kind: str, names: Sequence[str]) -> list[str]:
    """Return the objects as in records, where ids of nodes have leading zeros."""
    if not names:
        return [kind]
    found = [name.zfill(10) if kind == "node" and name.isdecimal() else name for name in names]
    return [f"{kind} {name}" for name in found] if kind != "label" else [f"label {','.join(found)}"]


def _note(context: Context, event: str, fields: dict[str, object]) -> None:
    # The command has done its work, or has failed for this reason already.
    with contextlib.suppress(KazooException, ZKException, TimeoutError):
        history.append(context.kazoo, event, fields)
