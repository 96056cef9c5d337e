"""Verification of new uploads before launchers use them (BLD-25)."""

from __future__ import annotations

import logging
import threading
import time

from kazoo.exceptions import KazooException

from nodepool import ssh
from nodepool.base.backoff import Backoff, KeyedBackoff
from nodepool.base.problems import Problem, one_line
from nodepool.config.diskimages import Verify
from nodepool.config.model import disk_image
from nodepool.exceptions import ZKException
from nodepool.launcher.state import LauncherState
from nodepool.lease import LeaseError, Leases, Terms
from nodepool.lease.ssh import machine
from nodepool.reasons import Declined
from nodepool.zk import declines
from nodepool.zk.locks.turn import TurnLock
from nodepool.zk.mirror.requests import VERIFIER
from nodepool.zk.records import FAILED, FULFILLED, ImageUpload, Node, NodeRequest
from nodepool.zk.rollback import UPLOAD, RollbackRefused, Rollbacks, unverified, upload_path

#: As the least urgent requests of Zuul.
PRIORITY = "300"
#: Seconds between two checks without any event.
RESYNC = 30.0
#: Pauses until a verification that could not be done is repeated.
RETRY = Backoff(60.0, 3600.0)
#: Failed requests for a machine after which the upload counts as bad.
MOST_FAILURES = 2
#: Seconds until a refused login is repeated: the machine may just be installing the key.
LOGIN_AGAIN = 5.0
#: Bytes of the command's output that are kept.
OUTPUT = 2000
#: Seconds that the lease of the machine is longer than the command may take.
MARGIN = 120


class _NotYet(Exception):
    """The upload could not be tried; the text says why."""


class _NotNeeded(Exception):
    """The upload does not wait for its verification any more, or the launcher ends."""


#: After these, the verification is repeated later.
FAILURES = (
    _NotYet,
    RollbackRefused,
    KazooException,
    ZKException,
    TimeoutError,
    LeaseError,
    OSError,
)


class Verification(threading.Thread):
    """Starts a thread for each provider with an unverified upload; woken by events.

    A verification of which the launcher dies leaves a lease, which ends in time, or a request,
    which ends with the session.
    """

    log = logging.getLogger("nodepool.Verification")

    def __init__(self, state: LauncherState) -> None:
        super().__init__(name="CleanupWorker-verification", daemon=True)
        self.state = state
        self._changed = threading.Condition()
        self._news = 0
        self._stopping = False
        self._runs: dict[str, threading.Thread] = {}
        #: Upload -> why it is not verified yet.
        self._reasons: dict[str, Problem] = {}
        self._pauses = KeyedBackoff(RETRY)
        self._failures: dict[str, int] = {}
        #: The running programs, which are killed at the end.
        self._programs = ssh.Programs()

    def wake(self) -> None:
        with self._changed:
            self._news += 1
            self._changed.notify_all()

    def stop(self) -> None:
        self._stopping = True
        self.wake()
        self._programs.stop()

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        for run in list(self._runs.values()):
            run.join(timeout)

    def problems(self) -> list[Problem]:
        with self._changed:
            return list(self._reasons.values())

    def run(self) -> None:
        while not self._stopping:
            news, seconds = self._news, RESYNC
            try:
                seconds = self._pass()
            except (KazooException, ZKException, TimeoutError) as error:
                self.log.warning("Cannot look for unverified images now: %r", error)
            except Exception:
                self.log.exception("Error while looking for unverified images:")
            self._wait(news, seconds)

    def _wait(self, news: int, seconds: float) -> None:
        """Wait for news since this number."""
        with self._changed:
            self._changed.wait_for(lambda: self._news != news or self._stopping, seconds)

    # -- which uploads

    def _waiting(self) -> dict[str, ImageUpload]:
        """Return the unverified uploads of our providers and images by path."""
        config = self.state.config
        uploads = [each.replaced for each in unverified(self.state.zk.readImages())]
        return {
            upload_path(each): each
            for each in uploads
            if each.provider_name in config.providers and each.image_name in config.diskimages
        }

    def _pass(self) -> float:
        """Start verifications; return the seconds until the next pass."""
        zk = self.state.zk
        if zk is None or self.state.config is None or not (zk.connected and zk.synced):
            return RESYNC
        self._delete_lost_requests()
        waiting, seconds = self._waiting(), RESYNC
        with self._changed:
            for known in (self._reasons, self._failures):
                for path in known.keys() - waiting.keys():
                    known.pop(path)
        for path, upload in waiting.items():
            provider = upload.provider_name or ""
            if self._runs_at(provider):
                continue
            if left := self._pauses.wait(path):
                seconds = min(seconds, left)
                continue
            name = f"CleanupWorker-verification-{provider}"
            self._runs[provider] = threading.Thread(
                target=self._verify, args=(upload,), name=name, daemon=True
            )
            self._runs[provider].start()
        return seconds

    def _runs_at(self, provider: str) -> bool:
        run = self._runs.get(provider)
        return run is not None and run.is_alive()

    def _delete_lost_requests(self) -> None:
        """Delete our requests whose creation or deletion was not answered."""
        tree = self.state.zk.request_tree
        for request in filter(None, map(tree.get, list(tree.verifying))):
            if tree.is_own(request) and not self._runs_at(request.provider or ""):
                self.log.info("Deleting request %s of an earlier verification", request.id)
                self.state.zk.deleteNodeRequest(request)

    # -- one upload

    def _verify(self, upload: ImageUpload) -> None:
        """Try an upload unless another launcher does, and store the result."""
        path, zk = upload_path(upload), self.state.zk
        what = f"Build {upload.build_id} of image {upload.image_name}"
        where = f"provider {upload.provider_name}"
        turn = TurnLock(
            zk.kazoo_client,
            self.state.identifier,
            "verify",
            str(upload.image_name),
            str(upload.provider_name),
        )
        try:
            while not turn.take():
                news = self._news
                turn.when_free(self.wake)
                self._wait(news, RESYNC)
                self._check_needed(upload)
            try:
                self._check_needed(upload)
                failure = self._failure(upload)
                if Rollbacks(zk, self.state.clock.time).verified(upload, failure):
                    text = "is good, and is used" if failure is None else f"is not used: {failure}"
                    level = logging.INFO if failure is None else logging.WARNING
                    self.log.log(level, "%s at %s %s", what, where, text)
            finally:
                turn.drop()
            self._pauses.succeeded(path)
        except FAILURES as error:
            self._later(upload, one_line(str(error) or type(error).__name__))
        except _NotNeeded as error:
            self.log.info("The verification of %s has ended without a result: %s", path, error)
        except Exception:
            self.log.exception("%s at %s could not be verified:", what, where)
            self._later(upload, "internal error, see the log of the launcher")
        finally:
            self._runs.pop(upload.provider_name or "", None)
            self.wake()

    def _later(self, upload: ImageUpload, reason: str) -> None:
        path, image, provider = upload_path(upload), upload.image_name, upload.provider_name
        self._pauses.failed(path)
        problem = Problem(
            f"build {upload.build_id} of image {image} is not verified yet, and not used: {reason}",
            provider,
            help=f"`nodepool image-rollforward {image} --provider {provider}` uses it without "
            "verification",
        )
        with self._changed:
            self._reasons[path] = problem
        self.log.warning("%s", problem)

    def _failure(self, upload: ImageUpload) -> str | None:
        """Return why the upload is bad; None: it is good.

        :raises _NotYet, _NotNeeded: that is not known.
        """
        config = self.state.config
        image, provider = upload.image_name or "", upload.provider_name or ""
        diskimage = config.diskimages.get(image)
        verify = diskimage.verify if diskimage is not None else None
        if verify is None:  # it was removed since, or builders and launchers have other files
            raise _NotYet("this launcher has no option `verify` of the image")
        if 0 < (config.max_hold_age or 0) < verify.timeout:
            raise _NotYet(f"max-hold-age is shorter than the timeout of {verify.timeout} s")
        if (problem := ssh.key_problem(verify.ssh_key)) is not None:
            raise _NotYet(f"this launcher cannot log in: {problem}")
        request, leases = NodeRequest(), Leases(self.state.zk, self.state.clock.time)
        request.state, request.requestor, request.reuse = "requested", VERIFIER, False
        request.requestor_data = {UPLOAD: upload_path(upload)}
        request.provider, request.created_time = provider, self.state.clock.time()
        request.node_types = [self._label(image, provider, verify)]
        self.state.zk.storeNodeRequest(request, PRIORITY)
        self.log.info("Request %s verifies %s", request.id, upload_path(upload))
        try:
            served = self._served(request, upload)
            if served.state == FAILED:
                return self._not_served(served, upload)
            terms = Terms(VERIFIER, "launcher", f"verification of {image}")
            lease = leases.hand_over(served.id or "", verify.timeout + MARGIN, terms, served)
        except BaseException:
            self.state.zk.deleteNodeRequest(request)
            raise
        try:
            return self._try(lease.nodes[0], upload, verify)
        finally:
            leases.give_back(lease.id, lease)

    def _label(self, image: str, provider: str, verify: Verify) -> str:
        """Return the label of the machine."""
        labels = [
            name
            for pool in self.state.config.providers[provider].pools.values()
            for name in pool.labels
            if getattr(disk_image(pool.labels[name]), "name", None) == image
        ]
        if not labels or (verify.label or labels[0]) not in labels:
            raise _NotYet(
                f"no pool of the provider has {f'label {verify.label}' if verify.label else 'any'} "
                "with this image"
            )
        return verify.label or labels[0]

    def _served(self, request: NodeRequest, upload: ImageUpload) -> NodeRequest:
        """Wait for the machine, as long as the upload waits for its verification."""
        while True:
            news = self._news
            found = self.state.zk.getNodeRequest(request.id or "")
            if found is None:
                raise _NotYet("its request was deleted")
            if found.state in (FULFILLED, FAILED):
                return found
            self._check_needed(upload)
            self._wait(news, RESYNC)

    def _check_needed(self, upload: ImageUpload) -> None:
        zk = self.state.zk
        if self._stopping or (zk.synced and upload_path(upload) not in self._waiting()):
            raise _NotNeeded("it is not needed any more")

    def _not_served(self, request: NodeRequest, upload: ImageUpload) -> str:
        """Return why the upload is bad, because its machines do not start."""
        text, request_id = f"`nodepool explain request {request.id}`", request.id or ""
        kazoo = self.state.zk.kazoo_client
        found = declines.read(kazoo, ((request_id, each) for each in request.declined_by))
        self.state.zk.deleteNodeRequest(request)
        if not any(Declined.NODES_FAILED.word in each.codes for each in found.values()):
            said = "; ".join(each.text for each in found.values()) or f"see {text}"
            raise _NotYet(f"no pool can launch a machine now: {said}")
        return self._again(upload, f"its machines do not start, see {text}")

    def _again(self, upload: ImageUpload, reason: str) -> str:
        """Return why the upload is bad, if that has happened before: a machine may fail, too."""
        path = upload_path(upload)
        with self._changed:
            count = self._failures[path] = self._failures.get(path, 0) + 1
        if count < MOST_FAILURES:
            raise _NotYet(f"{reason}; there will be another attempt")
        return reason

    def _try(self, node: Node, upload: ImageUpload, verify: Verify) -> str | None:
        """Run the command on the machine; return why the upload is bad."""
        if node.image_id != upload_path(upload):
            raise _NotYet("a launcher of another release has launched the image in use")
        target, output = machine(node), ssh.Kept(OUTPUT)
        if (problem := ssh.unreachable(target)) is not None:
            raise _NotYet(problem)
        deadline, refused = time.monotonic() + verify.timeout, None
        login = target, verify.ssh_key, verify.command, output, deadline, self._programs
        while True:
            try:
                status = ssh.run_with_key(*login, insecure=True)
                break
            except ssh.Interrupted as error:
                self._check_needed(upload)
                return self._again(upload, one_line(f"its command has no end: {error}"))
            except ssh.Lost as error:
                self.log.debug("Node %s cannot be logged in to yet: %s", node.id, error)
                refused = one_line(f"cannot log in as {node.username}: {error}")
            except TimeoutError as error:
                if not str(error):
                    return f"its command has not ended within {verify.timeout} s"
                return refused or one_line(f"cannot log in as {node.username}: {error}")
            self._check_needed(upload)
            self._wait(self._news, LOGIN_AGAIN)
        said = one_line(output.content().decode("utf-8", "replace"))
        said = f": {said}" if said else ""
        return f"its command has ended with status {status}{said}" if status else None
