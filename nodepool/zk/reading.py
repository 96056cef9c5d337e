"""Pipelined reads of many znodes, and writes, with a deadline for each answer.

:raises KazooException: (all functions) no connection, or no answer in time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NoAuthError, NodeExistsError, NoNodeError
from kazoo.protocol.states import ZnodeStat

from nodepool.zk.writer import advancing

#: Seconds for one answer of the server, and number of concurrent reads.
TIMEOUT, PIPELINE = 30.0, 500
#: What does not exist, or may not be read.
UNREADABLE = (NoNodeError, NoAuthError)
#: Attempts to write a znode that another client creates or deletes at the same time.
TRIES = 3


def children(kazoo: KazooClient, parent: str) -> list[str]:
    """Return the sorted names of the children; none if the parent does not exist."""
    try:
        return sorted(kazoo.get_children_async(parent).get(timeout=TIMEOUT))
    except NoNodeError:
        return []


def answers(
    ask: Callable[[str], Any],
    wanted: Iterable[str],
    omitted: tuple[type[KazooException], ...] = (NoNodeError,),
) -> Iterator[tuple[str, Any]]:
    """Yield each path with the answer of the server.

    :param ask: starts to read one path, such as ``kazoo.get_async``.
    :param omitted: errors of paths that are not yielded; `UNREADABLE` only where nobody takes what
        cannot be read for gone.
    """
    paths = list(wanted)
    for start in range(0, len(paths), PIPELINE):
        for path, asked in [(path, ask(path)) for path in paths[start : start + PIPELINE]]:
            try:
                answer = asked.get(timeout=TIMEOUT)
            except omitted:
                continue
            yield path, answer


def create_next(kazoo: KazooClient, directory: str, data: bytes) -> str:
    """Create a child with the next number; return its path.

    :raises NodeExistsError: the numbers of many children are ahead of the sequence.
    """

    def create() -> str:
        creation = kazoo.create_async(f"{directory}/", data, sequence=True, makepath=True)
        return str(creation.get(timeout=TIMEOUT))

    try:
        return create()
    except NodeExistsError:
        transaction = kazoo.transaction()
        transaction.operations += advancing(str(kazoo.chroot) + directory)
        transaction.commit_async().get(timeout=TIMEOUT)
    return create()


def write(kazoo: KazooClient, path: str, data: bytes, ephemeral: bool = False) -> ZnodeStat | None:
    """Write a znode, or create it with its parents; an ephemeral one ends with our session.

    :return: None if it was created.
    :raises NodeExistsError: other clients created and deleted it at each attempt.
    """
    for left in reversed(range(TRIES)):
        try:
            stat = kazoo.set_async(path, data).get(timeout=TIMEOUT)
            session = kazoo.client_id
            if not ephemeral or session is None or stat.ephemeralOwner == session[0]:
                return cast(ZnodeStat, stat)
            # From an earlier process with this name, or from our last session, with which it would
            # end.
            remove(kazoo, path)
        except NoNodeError:
            pass
        try:
            kazoo.create_async(path, data, ephemeral=ephemeral, makepath=True).get(timeout=TIMEOUT)
            break
        except NodeExistsError:
            if not left:
                raise
    return None


def remove(kazoo: KazooClient, path: str) -> None:
    """Delete a znode, if it exists."""
    with contextlib.suppress(NoNodeError):
        kazoo.delete_async(path).get(timeout=TIMEOUT)
