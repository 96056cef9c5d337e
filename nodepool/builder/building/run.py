"""One build of an image, from its record to its result (BLD-7 and BLD-17)."""

from __future__ import annotations

import dataclasses
import logging
import os
import statistics
import threading
import time
import uuid
from collections import deque

from kazoo.exceptions import BadVersionError, KazooException, NoNodeError

from nodepool import metrics
from nodepool.base import optional
from nodepool.builder.building import command
from nodepool.builder.building.diagnosis import Diagnosis
from nodepool.builder.building.plan import WantedBuild
from nodepool.builder.building.process import BuildProcess, ProcessResult
from nodepool.builder.machine import build_journal, image_files
from nodepool.builder.progress import gauges
from nodepool.builder.progress.phases import PhaseTracker
from nodepool.builder.retention import make_newest, ready_builds
from nodepool.builder.state import BuilderState
from nodepool.config.diskimages import DiskImage
from nodepool.config.model import Config
from nodepool.exceptions import BuilderError, ConfigurationError
from nodepool.zk import paths
from nodepool.zk.locks.long_held import HeldLock, Lost
from nodepool.zk.mirror.progress import ProgressStore
from nodepool.zk.records import BUILDING, FAILED, READY, ImageBuild
from nodepool.zk.records.progress import TAIL_LINES, BuildProgress

LOG_DIRECTORY = "/var/log/nodepool/builds"
#: A build requires space for its trees and for the conversion.
SPACE_FACTOR = 2
#: Seconds for deleting the leftovers of a build when the builder stops; the next start does the
#: rest.
STOP_CLEAN_TIME = 6.0
#: Formats for which the tool creates no file.
WITHOUT_FILE = frozenset({"docker"})


class BuildRun:
    """Runs the command for one image; the caller holds the build lock."""

    def __init__(
        self,
        state: BuilderState,
        config: Config,
        diskimage: DiskImage,
        wanted: WantedBuild,
        lock: HeldLock,
        log: logging.Logger,
    ) -> None:
        self._state = state
        self.image = wanted.image
        self.build_id = uuid.uuid4().hex
        self.lock = lock
        self.log = log
        self._config = config
        self._diskimage = diskimage
        self._wanted = wanted
        self._formats = sorted(diskimage.image_types)
        self._base = image_files.image_id(self.image, self.build_id)
        self._log_dir = config.build_log_dir or LOG_DIRECTORY
        self._tracker = PhaseTracker()
        self._phase_since = time.monotonic()
        self._diagnosis = Diagnosis()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process: BuildProcess | None = None
        self._entry: build_journal.BuildEntry | None = None
        self._aborted: str | None = None
        self._guard = threading.Lock()
        self.progress = BuildProgress(
            self.image,
            self.build_id,
            state.fqdn,
            state.builder_id,
            phase="starting",
            started=time.time(),
            expected=self._expected(),
            log=image_files.log_path(self._log_dir, self.image, self.build_id),
            formats=list(self._formats),
            manual=wanted.request is not None,
        )

    @property
    def key(self) -> tuple[str, str]:
        return self.image, self.build_id

    def abort(self, reason: str) -> None:
        """End the build soon; thread-safe."""
        with self._guard:
            self._aborted = reason
            if self._process is not None:
                self._process.terminate(reason)

    def _expected(self) -> float | None:
        """Return the median duration of earlier builds of the image in seconds."""
        builds = self._state.zk.progress_tree.data().builds.values()
        known = [
            p.duration for p in builds if p.image == self.image and p.state == READY and p.duration
        ]
        return statistics.median(known) if known else None

    # -- steps of a build

    def execute(self) -> None:
        """Run the build and store its result."""
        zk = self._state.zk
        record = ImageBuild(self.image)
        record.builder = self._state.fqdn
        record.builder_id = self._state.builder_id
        record.formats = list(self._formats)
        record.state = BUILDING
        # Record first: every file and process of this build id then has a record.
        zk.storeBuild(self.image, record, self.build_id)
        self._publish()
        self.log.info("Build %s started; its log is %s", self._base, self.progress.log)
        ending: ProcessResult | None = None
        try:
            ending = self._run_command()
            reason = self._judge(ending)
        except Exception as error:
            reason = self._describe(error)
        if reason is not None and (
            ending is None
            or (ending.returncode == 0 and not ending.timed_out and not ending.terminated)
        ):
            self._note_in_log(reason)
        if ending is not None:
            record.username = self._diskimage.username
            record.python_path = self._diskimage.python_path
            record.shell_type = self._diskimage.shell_type
            self.progress.exit_code = 1 if ending.timed_out else ending.returncode
        if reason is not None and ending is not None:
            record.formats = []
        if reason is None:
            image_files.make_private(self._config.images_dir, *self.key)
        why_not = self._store(record, READY if reason is None else FAILED)
        reason = reason or why_not
        if reason is not None:
            # Incomplete images and files without a record are useless.
            image_files.delete_local_build(
                self._config.images_dir, self.image, self.build_id, self.log
            )
        self._finish(reason, ending)

    def _run_command(self) -> ProcessResult:
        config, diskimage = self._config, self._diskimage
        # Fails now instead of after hours of building.
        image_files.check_images_dir(config.images_dir)
        self._close_to_others(config.images_dir)
        output = os.path.join(config.images_dir, self._base)
        base = command.temporary_base(diskimage, os.environ)
        usual = SPACE_FACTOR * image_files.expected_bytes(config.images_dir, self.image)
        problem = image_files.check_space(
            config.images_dir, base, max(int(config.build_min_free) * image_files.MIB, usual)
        )
        if problem is not None:
            raise BuilderError(problem)
        args = command.build_command(diskimage, config.images_dir, self._base)
        entry = build_journal.begin(
            config.images_dir,
            self.image,
            self.build_id,
            base,
            private="TMPDIR" not in diskimage.env_vars,
        )
        self._entry = entry
        try:
            environment = (
                command.build_environment(
                    diskimage, output, config.elements_dir, os.environ, entry.private_tmp
                )
                | entry.environment
            )
            image_files.prune_logs(self._log_dir, self.image, config.build_log_retention, self.log)
            with image_files.open_log(self.progress.log) as log_file:
                secrets = [
                    diskimage.env_vars[name]
                    for name in diskimage.secret_names
                    if name in diskimage.env_vars
                ]
                process = BuildProcess(args, environment, log_file, self._line, secrets=secrets)
                self._start(process, args, entry)
                return process.wait(time.monotonic() + diskimage.build_timeout)
        finally:
            deadline = None if self._aborted is None else time.monotonic() + STOP_CLEAN_TIME
            for left in entry.end(deadline):
                self.log.error("Leftovers of build %s remain: %s", self._base, left)

    def _close_to_others(self, directory: str) -> None:
        try:
            image_files.close_to_others(directory)
        except OSError as error:
            self.log.warning(
                "Cannot set a default access control list for %s (%s): until build %s is over, "
                "images in it can be "
                "read by all who may enter it; take that right from others (chmod o-rwx)",
                directory,
                error.strerror,
                self._base,
            )

    def _start(
        self, process: BuildProcess, args: list[str], entry: build_journal.BuildEntry
    ) -> None:
        with self._guard:
            if self._aborted is not None:
                raise BuilderError(f"not started: {self._aborted}")
            try:
                process.start()
            except OSError as error:
                self.log.error("Cannot start %s: %s", " ".join(args), error)
                raise BuilderError(
                    f"cannot start {args[0]}: {error.strerror or error}; "
                    f"{_start_remedy(error, args[0])}"
                ) from error
            self._process = process
        assert process.pid is not None
        entry.started(process.pid)

    def _line(self, text: str) -> None:
        """Process one line of output; on the worker's thread."""
        known = len(self._tracker.build_dirs)
        changed = self._tracker.feed(text)
        self._diagnosis.feed(text)
        for directory in self._tracker.build_dirs[known:]:
            noted = self._entry is not None and self._entry.note_dir(directory)
            if noted and os.path.basename(directory).startswith("dib_image."):
                # After this line, a raw image is created there over a long time and moved
                # unchanged.
                self._close_to_others(directory)
        self._tail.append(text)
        progress = self.progress
        if changed:
            self._phase_ended(progress.phase)
        progress.phase = self._tracker.phase
        progress.last_line = self._tracker.last_line
        if changed:
            image_files.make_private(self._config.images_dir, *self.key)
            self._publish()
        else:
            self._state.publisher.detail(("build", self.build_id), self._write_progress)

    def _phase_ended(self, phase: str | None) -> None:
        now = time.monotonic()
        self._state.statsd.timing(
            metrics.BUILD_PHASE_TIME(self.image, phase), (now - self._phase_since) * 1000
        )
        self._phase_since = now

    def _judge(self, ending: ProcessResult) -> str | None:
        """Return why the build failed, or None if it succeeded."""
        if ending.timed_out:
            return f"build-timeout of {self._diskimage.build_timeout} s exceeded"
        if ending.terminated is not None:
            return ending.terminated
        if ending.returncode:
            last = f": {self._diagnosis.cause}" if self._diagnosis.cause else ""
            how = (
                f"signal {-ending.returncode}"
                if ending.returncode < 0
                else f"exit status {ending.returncode}"
            )
            return f"the command ended with {how}{last}"
        directory = self._config.images_dir
        sizes = {
            str(f.extension): os.path.getsize(f.to_path(directory))
            for f in image_files.DibImageFile.from_image_id(directory, self._base)
        }
        # The command may mark its end with other files.
        if empty := [format for format in self._formats if sizes.get(format) == 0]:
            return (
                "the command ended with exit status 0, but wrote an empty file for "
                f"{', '.join(empty)}"
            )
        missing = set(self._formats) - sizes.keys() - WITHOUT_FILE
        if not missing:
            return None
        wanted = {
            p.image_type
            for p in self._config.providers.values()
            if p.manage_images and self.image in (p.diskimages or {}) and p.image_type
        }
        if missing & wanted or not sizes:
            return (
                f"the command ended with exit status 0, but wrote no file for "
                f"{', '.join(sorted(missing & wanted or missing))} (expected {self._base}.<format> "
                "in images-dir)"
            )
        self.log.warning("Build %s has no file for %s", self._base, ", ".join(sorted(missing)))
        return None

    def _describe(self, error: Exception) -> str:
        """Return the reason for users; :meth:`_finish` logs it."""
        if isinstance(error, OSError) and error.filename:
            remedy = (
                "; make it writable for the user of the builder"
                if isinstance(error, PermissionError)
                else ""
            )
            return f"{error.filename}: {error.strerror}{remedy}"
        if isinstance(error, (BuilderError, ConfigurationError, OSError, ValueError)):
            return str(error)
        self.log.exception("Build %s failed:", self._base)
        return f"internal error: {type(error).__name__}: {error}"

    def _note_in_log(self, reason: str) -> None:
        """Add the reason to the build log, since the command itself did not print it."""
        self._tail.append(f"Build failed: {reason}")
        try:
            with image_files.open_log(self.progress.log) as log_file:
                log_file.write(f"Build failed: {reason}\n".encode())
        except OSError as error:
            self.log.warning("Cannot write build log %s: %s", self.progress.log, error)

    # -- results

    def _store(self, record: ImageBuild, state: str) -> str | None:
        """Write the result once the session is usable; return why it cannot be stored, or None."""

        def write(contender: str) -> None:
            if self.lock.regained and self._somebody_built():
                raise Lost(
                    "the ZooKeeper session was lost and another builder has built the image since"
                )
            record.state = state
            if state == READY:
                builds = ready_builds(self._state.zk.readImages()).get(self.image, [])
                others = (build for build in builds if build.id != self.build_id)
                make_newest(record, next(others, None), self.log)
            self._state.zk.storeBuild(self.image, record, self.build_id, contender)

        try:
            self.lock.store(
                write, self._state.session_usable, lambda: not self._state.stopping_at_once.is_set()
            )
        except Exception as error:
            if not isinstance(error, Lost):
                self.log.exception("Cannot store the result of build %s:", self._base)
            return f"the result could not be stored: {error}"
        return None

    def _somebody_built(self) -> bool:
        """Return whether another builder has built the image since our session was lost."""
        newest = self._state.zk.getMostRecentBuilds(1, self.image, READY)
        return (newest[0].id if newest else None) not in (self._wanted.newest, self.build_id)

    def _finish(self, reason: str | None, ending: ProcessResult | None) -> None:
        progress, backoff = self.progress, self._state.build_backoff
        progress.ended = time.time()
        progress.duration = progress.ended - (progress.started or progress.ended)
        progress.state = READY if reason is None else FAILED
        progress.reason = reason
        self._phase_ended(progress.phase)
        if reason is None:
            progress.phase = "done"
            progress.sizes = image_files.sizes(self._config.images_dir, self._base)
            backoff.succeeded(self.image)
            self.log.info("Build %s is ready after %.0f s", self._base, progress.duration)
            self._remove_request()
        else:
            progress.next_try = backoff.failed(self.image, self._wanted.subject)
            self.log.error(
                "Build %s failed: %s; log %s; next attempt in %.0f s",
                self._base,
                reason,
                progress.log,
                progress.next_try - time.time(),
            )
        self._publish()
        if ending is not None:
            self._send_statistics()

    def _remove_request(self) -> None:
        """Remove the served build request; a request made during the build remains."""
        if self._wanted.request is None:
            return
        try:
            self._state.zk.kazoo_client.delete(
                f"{paths.image(self.image)}/request-build", version=self._wanted.request[1]
            )
        except (NoNodeError, BadVersionError):
            pass
        except KazooException as error:
            self.log.warning("Cannot remove the build request of image %s: %r", self.image, error)

    def _send_statistics(self) -> None:
        statsd, progress = self._state.statsd, self.progress
        for extension, size in progress.sizes.items():
            statsd.gauge(metrics.IMAGE_SIZE(self.image, extension), size)
        statsd.gauge(metrics.IMAGE_EXIT_STATUS(self.image), progress.exit_code or 0)
        statsd.timing(metrics.IMAGE_BUILD(self.image), (progress.duration or 0) * 1000)
        statsd.gauge(metrics.IMAGE_LAST_BUILD(self.image), int(progress.ended or 0))

    # -- progress

    def _publish(self) -> None:
        self._state.publisher.write(("build", self.build_id), self._write_progress)

    def _write_progress(self, store: ProgressStore) -> None:
        now = time.time()
        store.write(dataclasses.replace(self.progress, tail=list(self._tail), updated=now))
        gauges.build_progress(self._state.statsd, self._state.fqdn, self.progress, now)


def _start_remedy(error: OSError, program: str) -> str:
    if isinstance(error, FileNotFoundError) and os.path.exists(program):
        return "the interpreter named in its first line is missing"
    if isinstance(error, FileNotFoundError):
        absent = optional.missing(["diskimage_builder"])
        return (
            f"install diskimage-builder on this host{f' ({absent})' if absent else ''} or "
            "correct dib-cmd"
        )
    if isinstance(error, PermissionError):
        return "make it executable for the user of the builder or correct dib-cmd"
    return "correct dib-cmd"
