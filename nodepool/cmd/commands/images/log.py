"""``image-log``: the log of a build, from its local file or the excerpt in ZooKeeper."""

from __future__ import annotations

import argparse
import os
import select
import stat
import sys
import threading
from typing import Any, BinaryIO

from nodepool.cmd.commands.context import CommandError, Context, Subparsers, add_command
from nodepool.cmd.commands.images.follow import mirrored
from nodepool.zk.connection.client import ZooKeeperClient
from nodepool.zk.mirror.progress import BuildProgress, ProgressTree

CHUNK = 1 << 16
#: Seconds after which the file is read even without an event (some file systems send none).
LOOK_AGAIN = 10.0
#: Longest sleep in seconds while waiting for a change in ZooKeeper.
LONGEST_WAIT = 60.0
#: Control characters become "?", except tab, line feed and carriage return.
_CONTROL = bytes(ord("?") if (code < 32 and code not in (9, 10, 13)) or code == 127 else code for code in range(256))


def register(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "image-log", image_log, "print the log of a build")
    parser.add_argument(
        "image", metavar="IMAGE", help="image name (selects its running or else newest build), or <image>-<build id>"
    )
    parser.add_argument("--follow", "-f", action="store_true", help="follow the log until the build finishes")
    parser.add_argument("--lines", "-n", metavar="N", type=_count, help="start with the last N lines (default: all)")


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return number


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
        _show_tail(context.zk.client, build, args.lines, follow)
        return
    with stream:
        _copy(stream, args.lines)
        if follow:
            _follow_file(context.zk.client, build, stream)


def choose(context: Context, name: str) -> BuildProgress:
    """Return the build of that name, or the image's running or else newest one.

    :raises CommandError: nothing is known about it.
    """
    builds: list[BuildProgress] = context.zk.progress.read_builds()
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
    return os.fdopen(descriptor, "rb", buffering=0)


# -- the file


def _start_of_last_lines(stream: BinaryIO, lines: int) -> int:
    """Return the offset of the last lines of the file; a final newline ends the last one."""
    end = stream.seek(0, os.SEEK_END)
    if lines == 0:
        return end
    position, wanted, last = end, lines, True
    while position > 0:
        size = min(CHUNK, position)
        position -= size
        stream.seek(position)
        block = stream.read(size)
        search = len(block) - 1 if last and block.endswith(b"\n") else len(block)
        last = False
        while (found := block.rfind(b"\n", 0, search)) >= 0:
            wanted -= 1
            if wanted == 0:
                return position + found + 1
            search = found
    return 0


def _copy(stream: BinaryIO, lines: int | None = None) -> None:
    if lines is not None:
        stream.seek(_start_of_last_lines(stream, lines))
    _copy_rest(stream)


def _copy_rest(stream: BinaryIO) -> None:
    sys.stdout.flush()
    if os.fstat(stream.fileno()).st_size < stream.tell():
        stream.seek(0)  # the file was rewritten
    terminal = sys.stdout.isatty()
    while block := stream.read(CHUNK):
        sys.stdout.buffer.write(for_terminal(block) if terminal else block)
    sys.stdout.buffer.flush()


def for_terminal(block: bytes) -> bytes:
    """Return the text without control characters, which a build may have printed."""
    return block.translate(_CONTROL).replace(b"\xc2\x9b", b"?")


class _Wake:
    """A wake-up for poll() that any thread can raise, also after it was closed."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._open = True

    def set(self, _image: str = "") -> None:
        with self._lock:
            if self._open:
                os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            pass

    def close(self) -> None:
        with self._lock:
            self._open = False
            os.close(self.descriptor)


def _follow_file(client: ZooKeeperClient, build: BuildProgress, stream: BinaryIO) -> None:
    """Print appended data until the build has ended; inotify and a watch announce changes."""
    tree = ProgressTree(client)
    wake = _Wake()
    inotify = _inotify(build.log)
    try:
        tree.listeners.append(wake.set)
        tree.sync_listeners.append(wake.set)
        with mirrored(tree):
            poll = select.poll()
            poll.register(wake.descriptor, select.POLLIN)
            if inotify is not None:
                poll.register(inotify.fileno(), select.POLLIN)
            while True:
                now = _present(tree, build)
                _copy_rest(stream)  # checked after the record: if it has ended, nothing is written any more
                if now is None or not now.running:
                    _tell_end(build, now)
                    return
                poll.poll((LOOK_AGAIN if inotify is not None else 1.0) * 1000)
                wake.clear()
                if inotify is not None:
                    inotify.read(timeout=0)
    finally:
        if inotify is not None:
            inotify.close()
        wake.close()


def _inotify(path: str) -> Any:
    """Return an inotify watch on the file; None if not available."""
    from inotify_simple import INotify, flags

    try:
        inotify = INotify(nonblocking=True)
    except OSError:
        return None
    try:
        inotify.add_watch(path, flags.MODIFY | flags.CLOSE_WRITE)
    except OSError:
        inotify.close()
        return None
    return inotify


def _present(tree: ProgressTree, build: BuildProgress) -> BuildProgress | None:
    """Return the current record; the last known one while ZooKeeper is not available."""
    found = tree.builds.get(build.build)
    return build if found is None and not tree.synced.is_set() else found


def _tell_end(build: BuildProgress, now: BuildProgress | None) -> None:
    name = f"{build.image}-{build.build}"
    if now is None:
        _note(f"Nothing is known of {name} any more")
    elif now.reason:
        _note(f"{name}: {now.state}: {now.reason}")
    else:
        _note(f"{name}: {now.state}")


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


def _show_tail(client: ZooKeeperClient, build: BuildProgress, lines: int | None, follow: bool) -> None:
    tail = build.tail
    _print(tail if lines is None else tail[len(tail) - min(lines, len(tail)) :])
    if not follow:
        return
    tree = ProgressTree(client)
    changed = threading.Event()
    tree.listeners.append(lambda _image: changed.set())
    tree.sync_listeners.append(changed.set)
    with mirrored(tree):
        while True:
            changed.clear()
            now = _present(tree, build)
            if now is not None:
                fresh, gap = new_lines(tail, now.tail)
                _print([*(["[...]"] if gap and fresh else []), *fresh])
                tail = now.tail
            if now is None or not now.running:
                _tell_end(build, now)
                return
            changed.wait(LONGEST_WAIT)
