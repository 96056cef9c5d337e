"""SIGKILL of the builder around each call that changes something in a real glance, and around each
write that an upload or a deletion takes: in the end glance has what the records say.

After each start and one pass of the builder's clean-up nothing else is left; what arrives in the
cloud after that is the launcher's to find.
"""

from __future__ import annotations

import pathlib
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tests.conftest import wait_for, zookeeper_server
from tests.support.fault_proxy import Action, Fault, half_sent, html
from tests.support.faults.builder import BuilderBench
from tests.support.kill import Daemon, Revived, killing
from tests.support.openstack.cloud import OpenStackCloud, shape

pytestmark = [pytest.mark.openstack, pytest.mark.slow, pytest.mark.fault, pytest.mark.timeout(400)]

#: Seconds in which everything must be as it should be, on a loaded machine.
PATIENCE = 120.0
SIZE = 4 << 20
CREATE, SEND, PROTECT, DELETE = (
    "POST /images",
    "PUT /images/{id}/file",
    "PATCH /images/{id}",
    "DELETE /images/{id}",
)


class Builder(Revived):
    def __init__(self, bench: BuilderBench) -> None:
        self._bench = bench
        super().__init__()

    def _run(self) -> subprocess.Popen[bytes]:
        return self._bench.start(wait=False).process


class Glance:
    """As the clouds of the builder's bench."""

    def __init__(self, cloud: OpenStackCloud) -> None:
        self.cloud = cloud

    def images(self) -> list[dict[str, Any]]:
        return [{"id": image.id, "status": image.status} for image in self.cloud.images()]


class Bench:
    def __init__(self, cloud: OpenStackCloud, tmp: pathlib.Path) -> None:
        self.cloud = cloud
        self.files = BuilderBench(zookeeper_server(), tmp)
        self.files.all_clouds = {"p0": Glance(cloud)}  # type: ignore[dict-item]
        self.files.clouds.write_text(yaml.safe_dump({"clouds": {"test": cloud.entry}}))
        self.builders: list[Builder] = []
        self.faults: list[Fault] = []
        self.configure()

    def configure(self, wanted: bool = True, **meta: Any) -> pathlib.Path:
        """:param wanted: whether the provider has the image."""
        return self.files.config(
            images=[self.files.image(env={"CREATE_SIZE": str(SIZE)})],
            providers=[
                {
                    "name": "p0",
                    "driver": "openstack",
                    "cloud": "test",
                    "rate": 0,
                    "pools": [],
                    "diskimages": [{"name": "i0", "meta": meta}] if wanted else [],
                }
            ],
        )

    def start(self) -> Builder:
        self.builders.append(Builder(self.files))
        return self.builders[0]

    def at(self, call: str, action: Action) -> None:
        """Deal so with the next call of this shape."""
        self.faults.append(self.cloud.image.fail(lambda request: shape(request) == call, action))

    def kill_at(self, call: str, *when: str) -> None:
        for each in when:
            self.at(
                call,
                half_sent(self.cloud.image, self._kill_while_saving)
                if each == "half"
                else killing(self.builders, each),
            )

    def _kill_while_saving(self) -> None:
        wait_for(
            lambda: "saving" in [image.status for image in self.cloud.images()],
            60,
            "glance takes data in",
        )
        self.builders[0].kill()

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        """Until it holds and nothing is left that has no meaning; dead builders are started
        again meanwhile.
        """
        left: list[str] = []

        def look() -> bool:
            for builder in self.builders:
                builder.again()
            if not condition():
                return False
            left[:] = self.files.left()
            return not left

        try:
            wait_for(look, PATIENCE, what)
        except AssertionError as error:
            raise AssertionError(
                f"{error}; left: {left}; {self.files.builders[-1].text()[-3000:]}"
            ) from None

    def wait_uploaded(self) -> None:
        self.wait(self.files.uploads, "an upload")
        (upload,) = self.files.uploads(state=None)
        (image,) = self.cloud.images()
        assert (image.id, image.status, image.size) == (upload.external_id, "active", SIZE)
        assert len(self.files.runs()) == 1, "the image is built once"

    def wait_deleted(self) -> None:
        self.wait(
            lambda: not self.cloud.images() and not self.files.uploads(state=None), "upload gone"
        )
        assert len(self.files.builds()) == 1

    def check(self) -> None:
        assert [fault.used for fault in self.faults] == [1] * len(self.faults)
        assert self.builders[0].process.poll() is None

    def close(self) -> None:
        for builder in self.builders:
            builder.stop()
        self.files.close()


@pytest.fixture
def crashes(openstack_cloud: OpenStackCloud, tmp_path: pathlib.Path) -> Iterator[Bench]:
    bench = Bench(openstack_cloud, tmp_path / "builder")
    try:
        yield bench
    finally:
        bench.close()


at_every_step = pytest.mark.spec(
    "issue: SIGKILL of the builder at every step leaves nothing in the cloud after clean-up"
)


@at_every_step
@pytest.mark.parametrize(
    ("call", "when"),
    [(CREATE, ("before", "after")), (SEND, ("before", "half", "after"))],
    ids=["image", "data"],
)
def test_builder_killed_during_an_upload_leaves_one_image(
    crashes: Bench, call: str, when: tuple[str, ...]
) -> None:
    crashes.kill_at(call, *when)
    crashes.start()
    crashes.wait_uploaded()
    crashes.check()


@at_every_step
def test_protected_image_of_a_killed_upload_is_deleted(crashes: Bench) -> None:
    """The protection that the upload itself has put on does not keep what nobody knows."""
    crashes.configure(protected=True)
    crashes.kill_at(PROTECT, "before", "after")
    crashes.start()
    crashes.wait_uploaded()
    (image,) = crashes.cloud.images()
    assert image.is_protected
    crashes.check()


@at_every_step
@pytest.mark.parametrize("call", [CREATE, SEND, PROTECT], ids=["image", "data", "protection"])
def test_upload_that_arrives_late(crashes: Bench, call: str, tmp_path: pathlib.Path) -> None:
    """What comes into being after the builder has looked is found by the launcher."""
    path = crashes.configure(**({"protected": True} if call == PROTECT else {}))
    crashes.kill_at(call, "late")
    crashes.start()
    launcher = Daemon(
        tmp_path,
        "serve.py",
        str(path),
        NODEPOOL_FAULT_CLEANUP="0.5",
        OS_CLIENT_CONFIG_FILE=str(crashes.files.clouds),
    )
    try:
        crashes.wait_uploaded()
    finally:
        launcher.stop()
    crashes.check()


@at_every_step
def test_removal_of_a_failed_upload(crashes: Bench) -> None:
    crashes.at(SEND, html(502))
    crashes.kill_at(DELETE, "before", "after")
    crashes.start()
    crashes.wait_uploaded()
    crashes.check()


@at_every_step
@pytest.mark.parametrize("when", [("before", "after"), ("late",)], ids="-".join)
def test_builder_killed_during_a_deletion_leaves_no_image(
    crashes: Bench, when: tuple[str, ...]
) -> None:
    builder = crashes.start()
    crashes.wait_uploaded()
    builder.kill()
    crashes.configure(wanted=False)
    crashes.kill_at(DELETE, *when)
    crashes.wait_deleted()
    crashes.check()


UPLOAD_WRITES = (
    "upload-record-before",
    "upload-record-after",
    "note-before",
    "note-after",
    "upload-result-before",
    "upload-result-after",
)
DELETION_WRITES = ("mark-before", "mark-after", "delete-before", "delete-after")


def crash(crashes: Bench, point: str) -> None:
    builder = crashes.files.start(crash_at=point, wait=False)
    builder.end(PATIENCE)
    assert builder.process.returncode == -signal.SIGKILL, point


def upload_written(crashes: Bench, *points: str) -> None:
    for point in points:
        crash(crashes, point)
    crashes.start()
    crashes.wait_uploaded()


def deletion_written(crashes: Bench, *points: str) -> None:
    builder = crashes.start()
    crashes.wait_uploaded()
    builder.kill()
    crashes.configure(wanted=False)
    for point in points:
        crash(crashes, point)
    crashes.wait_deleted()


@at_every_step
def test_writes_of_an_upload(crashes: Bench) -> None:
    """One crash after the other: none is given the time to put right what the one before has
    left.
    """
    upload_written(crashes, *UPLOAD_WRITES)


@at_every_step
def test_writes_of_a_deletion(crashes: Bench) -> None:
    deletion_written(crashes, *DELETION_WRITES)


@at_every_step
@pytest.mark.exhaustive
@pytest.mark.parametrize("point", UPLOAD_WRITES)
def test_each_write_of_an_upload(crashes: Bench, point: str) -> None:
    upload_written(crashes, point)


@at_every_step
@pytest.mark.exhaustive
@pytest.mark.parametrize("point", DELETION_WRITES)
def test_each_write_of_a_deletion(crashes: Bench, point: str) -> None:
    deletion_written(crashes, point)
