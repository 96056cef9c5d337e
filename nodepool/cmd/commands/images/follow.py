"""Follow the build of an image by watches until it has ended (``image-build --wait``)."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, TextIO

from nodepool.status.results import format_bytes, format_duration
from nodepool.zk.mirror.images import ImageData
from nodepool.zk.mirror.progress import BuildProgress, ProgressData
from nodepool.zk.records import BUILDING, FAILED, READY, ImageBuild
from nodepool.zk.zookeeper import ZooKeeper

EXIT_OK, EXIT_FAILED, EXIT_TIMEOUT, EXIT_INTERRUPTED = 0, 1, 3, 130
#: Seconds between two updates of the running clock on a terminal; they need no ZooKeeper access.
TICK = 1.0
#: Longest sleep in seconds without a terminal.
LONGEST_WAIT = 60.0
#: Seconds that the record of the result may follow that of the build.
GRACE = 2.0
BAR = 16


class Display:
    """A line that is redrawn on a terminal; elsewhere one line per change."""

    def __init__(self, stream: TextIO) -> None:
        # All other commands start without it.
        from rich.console import Console
        from rich.live import Live

        console = Console(file=stream, highlight=False)
        self.live = stream.isatty() and not console.is_dumb_terminal
        self._line = Live(
            console=console,
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._stream = stream
        self._last: object = None

    def show(self, key: Hashable, text: str, live_text: str) -> None:
        """Show a line; ``key`` distinguishes plain lines, ``live_text`` is for a terminal."""
        if self.live:
            from rich.text import Text

            self._line.start()
            self._line.update(Text(live_text, no_wrap=True, overflow="crop"), refresh=True)
        elif key != self._last:
            self._last = key
            print(text, file=self._stream, flush=True)

    def clear(self) -> None:
        """Erase the line before permanent output."""
        self._line.stop()


@dataclass
class Outcome:
    """How it ended. ``state``: ready, failed, timeout, interrupted."""

    status: int
    state: str
    image: str
    build: str | None = None
    reason: str | None = None
    progress: BuildProgress | None = None
    record: ImageBuild | None = None
    #: The request still exists: a builder will retry.
    requested: bool = False

    def row(self) -> dict[str, Any]:
        progress, record = self.progress, self.record
        return {
            "image": self.image,
            "build": self.build,
            "state": self.state,
            "reason": self.reason,
            "exit_code": progress.exit_code if progress else None,
            "builder": (progress.builder if progress else None)
            or (record.builder if record else None),
            "formats": list(
                (progress.formats if progress else None) or (record.formats if record else ())
            ),
            "sizes": dict(progress.sizes) if progress else {},
            "duration": progress.elapsed(time.time()) if progress else None,
            "log": (progress.log if progress else None) or None,
            "requested": self.requested,
        }

    def lines(self) -> list[str]:
        name = f"{self.image}-{self.build}" if self.build else self.image
        row = self.row()
        result = []
        if self.state == READY:
            sizes = row["sizes"]
            made = ", ".join(
                f"{f} {format_bytes(sizes[f])}" if f in sizes else f for f in row["formats"]
            )
            took = f" in {format_duration(row['duration'])}" if row["duration"] is not None else ""
            result.append(f"Built {name}{took}{': ' + made if made else ''}")
        elif self.state == FAILED:
            code = f" (exit code {row['exit_code']})" if row["exit_code"] is not None else ""
            result.append(f"Failed {name}: {self.reason or 'no reason is known'}{code}")
        elif self.state == "timeout":
            result.append(
                f"Not finished in time: {name}; the "
                f"{'build continues' if self.build else 'request remains'}"
            )
        if row["log"]:
            result.append(f"Log: {row['builder'] or 'unknown host'}:{row['log']}")
        if self.state == FAILED and self.requested:
            when = self.progress.next_try if self.progress is not None else None
            wait = (
                f" in {format_duration(when - time.time())}"
                if when
                else " after a delay that grows with each failure"
            )
            result.append(f"The request remains; the builder retries{wait}")
        return result


class BuildFollower:
    """Waits for the first build of an image that was started after a request.

    :param after: zxid of the request; builds with an older record do not count.
    """

    def __init__(self, zk: ZooKeeper, image: str, after: int, display: Display) -> None:
        self.image = image
        self.build: str | None = None
        self._after = after
        self._display = display
        self._start = time.monotonic()
        self._changed = threading.Event()
        self._ended_at: float | None = None
        self._zk, self._images, self._progress = zk, zk.image_tree, zk.progress_tree
        self._images.listeners.append(lambda _image: self._changed.set())
        self._progress.listeners.append(lambda _image: self._changed.set())
        zk.component_tree.listeners.append(lambda _path, _gone: self._changed.set())
        for tree in zk.trees:
            tree.sync_listeners.append(self._changed.set)

    def follow(self, timeout: float | None) -> Outcome:
        """Wait up to ``timeout`` seconds.

        :raises KeyboardInterrupt: the user has stopped waiting; ``build`` names the running build.
        """
        try:
            while True:
                self._changed.clear()
                outcome = self._poll()
                if outcome is not None:
                    return outcome
                wait = TICK if self._display.live else LONGEST_WAIT
                now = time.monotonic()
                if self._ended_at is not None:
                    wait = max(0.0, min(wait, self._ended_at + GRACE - now))
                if timeout is not None:
                    if now - self._start >= timeout:
                        return self._outcome(EXIT_TIMEOUT, "timeout")
                    wait = min(wait, self._start + timeout - now)
                self._changed.wait(wait)
        finally:
            self._display.clear()

    def _outcome(self, status: int, state: str, reason: str | None = None) -> Outcome:
        build = self.build
        progress = self._progress.data().builds.get(build) if build else None
        if reason is None and progress is not None:
            reason = progress.reason
        images = self._images.data()
        record = next(
            (each for each in images.builds if (each.image_name, each.id) == (self.image, build)),
            None,
        )
        return Outcome(
            status,
            state,
            self.image,
            build,
            reason,
            progress,
            record,
            self.image in images.requests,
        )

    def _complete(self) -> bool:
        """Return whether all changes have been read.

        Deletions are seen immediately, changes only when they have been read.
        """
        return all(
            tree.synced.is_set() and not tree.reading for tree in (self._images, self._progress)
        )

    def _poll(self) -> Outcome | None:
        before = self._complete()
        images, progress = self._images.data(), self._progress.data()
        complete = before and self._complete()
        if self.build is None:
            self._find(images, progress, complete)
        if self.build is None:
            if complete and self.image not in images.requests:
                return self._outcome(
                    EXIT_FAILED, FAILED, "the request was deleted and no build was made for it"
                )
            self._show_waiting(images, progress)
            return None
        record = next(
            (b for b in images.builds if b.image_name == self.image and b.id == self.build), None
        )
        seen = progress.builds.get(self.build)
        if record is not None and record.state == BUILDING:
            self._show_building(seen, images, complete)
            return None
        if record is None and not complete:
            return None
        return self._ended(record, seen)

    def _find(self, images: ImageData, progress: ProgressData, complete: bool) -> None:
        mine = {
            b.id or "": b
            for b in images.builds
            if b.image_name == self.image and b.stat is not None
        }
        new = {
            i: b.stat.czxid
            for i, b in mine.items()
            if b.stat is not None and b.stat.czxid > self._after
        }
        # A build that failed immediately may have lost its record by now; its progress record lasts
        # longer.
        for build_id, seen in progress.builds.items():
            created = self._progress.created.get(seen.path, 0)
            if (
                seen.image == self.image
                and not seen.running
                and build_id not in mine
                and created > self._after
                and complete
            ):
                new[build_id] = created
        if not new and complete and self.image not in images.requests:
            # A builder of an earlier release: the end of a build that was already running has
            # served the request.
            new = {
                i: b.stat.czxid
                for i, b in mine.items()
                if b.stat is not None and b.stat.mzxid > self._after and b.state == READY
            }
        if new:
            self.build = min(new, key=lambda build_id: new[build_id])

    def _ended(self, record: ImageBuild | None, seen: BuildProgress | None) -> Outcome | None:
        if seen is None or seen.running:
            # Two records, written sequentially; builders of an earlier release write only one.
            now = time.monotonic()
            if self._ended_at is None:
                self._ended_at = now
            if now - self._ended_at < GRACE:
                return None
        state = record.state if record is not None else None
        if state == READY or (state != FAILED and seen is not None and seen.state == READY):
            return self._outcome(EXIT_OK, READY)
        if state == FAILED or (seen is not None and seen.state == FAILED):
            return self._outcome(EXIT_FAILED, FAILED)
        return self._outcome(
            EXIT_FAILED, FAILED, "the record of the build has vanished without a result"
        )

    # -- display

    def _line(self, key: Hashable, text: str) -> None:
        elapsed = format_duration(time.monotonic() - self._start)
        self._display.show(
            key, f"{elapsed}  {self.image}  {text}", f"{self.image}  {elapsed}  {text}"
        )

    def _show_waiting(self, images: ImageData, progress: ProgressData) -> None:
        running = [
            b
            for b in images.builds
            if b.state == BUILDING and images.build_locks.get(b.image_name or "", (0.0, False))[1]
        ]
        own = [b for b in running if b.image_name == self.image]
        if self.image in images.paused:
            text = "paused; it is built after image-unpause"
        elif not self._zk.getBuilders():
            text = "no builder is registered; the request waits for one"
        elif own:
            seen = progress.builds.get(own[0].id or "")
            phase = f" ({seen.phase})" if seen is not None and seen.phase else ""
            text = f"build {own[0].id} is running first{phase}"
            self._line(("own", own[0].id), text)
            return
        elif running:
            text = (
                "waiting for a free builder; running: "
                f"{', '.join(sorted({b.image_name or '' for b in running}))}"
            )
        else:
            text = "waiting for a builder"
        self._line(text, text)

    def _show_building(self, seen: BuildProgress | None, images: ImageData, complete: bool) -> None:
        name = f"{self.image}-{self.build}"
        if not images.build_locks.get(self.image, (0.0, False))[1]:
            # The lock is released right after the result is stored, which may not have been read
            # yet.
            if complete:
                self._line(
                    "lost",
                    f"{self.build}: its builder has ended or lost ZooKeeper; waiting for the "
                    "result",
                )
            return
        if seen is None:
            self._line(("building", self.build), f"{self.build} is being built")
            return
        now = time.time()
        elapsed = format_duration(seen.elapsed(now) or 0)
        phase = seen.phase or "starting"
        expected = format_duration(seen.expected) if seen.expected else ""
        fraction = seen.fraction(now)
        bar, clock = "", elapsed
        if fraction is not None:
            done = int(fraction * BAR)
            bar = f"[{'#' * done}{'-' * (BAR - done)}] {fraction:4.0%}  "
            clock += f" of {expected}"
        self._display.show(
            (self.build, phase),
            f"{elapsed}  {name}  {phase}{f' (expected: {expected})' if expected else ''}",
            f"{self.image}  {bar}{phase}  {clock}  {seen.last_line}",
        )
