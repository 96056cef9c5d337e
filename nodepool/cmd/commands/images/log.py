"""``image-log``: the log of a build, from its local file or the excerpt in ZooKeeper."""

from __future__ import annotations

import math
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import BinaryIO

from nodepool.base.file_events import FileEvents
from nodepool.base.problems import BUILDER_ENDED
from nodepool.cmd.commands.context import CommandError, Context, Subparsers, add_command
from nodepool.cmd.commands.images.follow import GRACE
from nodepool.process.program import whole_number
from nodepool.status.known import judged, read_progress
from nodepool.zk.mirror.progress import BuildProgress

CHUNK = 1 << 16
#: Control characters become "?", except tab, line feed and carriage return.
_CONTROL = bytes(
    ord("?") if (code < 32 and code not in (9, 10, 13)) or code == 127 else code
    for code in range(256)
)


def register(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "image-log", image_log, "print the log of a build")
    parser.add_argument(
        "image",
        metavar="IMAGE",
        help="image name (selects its running or else newest build), or <image>-<build id>",
    )
    parser.add_argument(
        "--follow", "-f", action="store_true", help="follow the log until the build finishes"
    )
    parser.add_argument(
        "--lines",
        "-n",
        metavar="N",
        type=whole_number(0),
        help="start with the last N lines (default: all)",
    )


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def image_log(context: Context) -> int:
    try:
        _show(context)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe (``| head``).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _show(context: Context) -> None:
    args = context.args
    build = choose(context, args.image)
    follow = args.follow and build.running
    stream = _open(build)
    if stream is None:
        where = f"on {build.builder}: {build.log}" if build.builder and build.log else "not known"
        _note(f"The log file is {where}; here are its last lines")
        _show_tail(context, build, args.lines, follow)
        return
    with stream:
        _copy(stream, args.lines)
        if follow:
            _follow(context, build, [build.log], lambda _now: _copy_rest(stream))


def choose(context: Context, name: str) -> BuildProgress:
    """Return the build of that name, or the image's running or else newest one.

    :raises CommandError: nothing is known about it.
    """
    builds = read_progress(context.zk).builds.values()
    for build in builds:
        if name == f"{build.image}-{build.build}":
            return build
    mine = [build for build in builds if build.image == name]
    if mine:
        return max(mine, key=lambda b: (b.running, b.started or b.updated or 0))
    records = context.zk.readImages().builds
    if any(name in (record.image_name, f"{record.image_name}-{record.id}") for record in records):
        raise CommandError(f"no log of {name} is available: its builder stores none in ZooKeeper")
    raise CommandError(f"no build of {name} is known; see dib-image-list --detail")


def _open(build: BuildProgress) -> BinaryIO | None:
    """Return the log file, if it is on this machine and readable."""
    # The path comes from ZooKeeper: only a file with the name of the build is accepted.
    if not os.path.isabs(build.log) or build.build not in os.path.basename(build.log):
        return None
    try:
        descriptor = os.open(build.log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        _note(f"Cannot read {build.log}: {error.strerror}")
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return os.fdopen(descriptor, "rb")


# -- the file


def _copy(stream: BinaryIO, lines: int | None) -> None:
    if lines is not None:
        _write(b"".join(deque(stream, maxlen=lines)))
    _copy_rest(stream)


def _copy_rest(stream: BinaryIO) -> None:
    sys.stdout.flush()
    if os.fstat(stream.fileno()).st_size < stream.tell():
        stream.seek(0)  # the file was rewritten
    while block := stream.read(CHUNK):
        _write(block)
    sys.stdout.buffer.flush()


def _write(block: bytes) -> None:
    sys.stdout.buffer.write(for_terminal(block) if sys.stdout.isatty() else block)


def for_terminal(block: bytes) -> bytes:
    """Return the text without control characters, which a build may have printed."""
    return block.translate(_CONTROL).replace(b"\xc2\x9b", b"?")


def _follow(
    context: Context,
    build: BuildProgress,
    files: list[str],
    show: Callable[[BuildProgress | None], None],
) -> None:
    """Show new parts of the log until the build has ended.

    The record is read before the log: if it has ended, nothing is written any more.

    :param files: *show* is called when they change, too.
    """
    progress, images, events = context.live.progress_tree, context.live.image_tree, FileEvents()
    progress.listeners.append(events.wake)
    images.listeners.append(events.wake)
    events.watch(files)
    unlocked = math.inf
    try:
        while True:
            now = judged(progress.data(), images.data()).builds.get(build.build)
            show(now)
            # The lock is released right after the result is stored, which may be read later.
            ended = now is not None and now.reason == BUILDER_ENDED
            unlocked = min(unlocked, time.monotonic()) if ended else math.inf
            left = GRACE + unlocked - time.monotonic()
            if now is None or not (now.running or (ended and left > 0)):
                break
            events.wait(left)
    finally:
        events.close()
    name = f"{build.image}-{build.build}"
    if now is None:
        _note(f"Nothing is known of {name} any more")
    else:
        _note(f"{name}: {now.state}{f': {now.reason}' if now.reason else ''}")


# -- the end of the log in ZooKeeper


def new_lines(old: list[str], new: list[str]) -> tuple[list[str], bool]:
    """Return the new lines of a log excerpt, and whether lines between are missing.

    ``old`` and ``new`` are the ends of the same log at two times.
    """
    for size in range(min(len(old), len(new)), 0, -1):
        if old[-size:] == new[:size]:
            return new[size:], False
    return new, bool(old)


def _print(lines: list[str]) -> None:
    for line in lines:
        print(for_terminal(line.encode()).decode() if sys.stdout.isatty() else line)
    sys.stdout.flush()


def _show_tail(context: Context, build: BuildProgress, lines: int | None, follow: bool) -> None:
    tail = build.tail
    _print(tail if lines is None else tail[len(tail) - min(lines, len(tail)) :])

    def show(now: BuildProgress | None) -> None:
        nonlocal tail
        if now is not None:
            fresh, gap = new_lines(tail, now.tail)
            _print([*(["[...]"] if gap and fresh else []), *fresh])
            tail = now.tail

    if follow:
        _follow(context, build, [], show)
