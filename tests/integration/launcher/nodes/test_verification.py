"""New uploads are tried on a machine before launchers use them (BLD-25)."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import json
import pathlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.base.backoff import Backoff
from nodepool.driver.fake.api import FakeApi
from nodepool.driver.fake.cloud import FakeOpenStackCloud
from nodepool.launcher.verification import MOST_FAILURES, Verification
from nodepool.lease.ssh import machine
from nodepool.ssh import Kept
from nodepool.zk.mirror.requests import VERIFIER
from nodepool.zk.records import READY, USED, ImageUpload, NodeRequest
from nodepool.zk.rollback import UPLOAD, Rollbacks, upload_path
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import wait_for
from tests.integration.cli.test_observe import Shell
from tests.support.launcher import LauncherBench, config, provider
from tests.support.sshd import SSHServer, ssh_server

IMAGE, PLACE, USER = "debian", "fake-provider", getpass.getuser()


@pytest.fixture(scope="module")
def sshd() -> Iterator[SSHServer]:
    with ssh_server(kinds=["ed25519"]) as server:
        yield server


class Scene:
    """Launchers whose machines are a real SSH server, and an image with a good upload."""

    def __init__(self, bench: LauncherBench, sshd: SSHServer, tmp: pathlib.Path) -> None:
        self.bench, self.sshd, self.tmp = bench, sshd, tmp
        self.old = self.upload(1000.0)

    def upload(self, state_time: float) -> ImageUpload:
        made: ImageUpload = self.bench.store_image(
            IMAGE, PLACE, username=USER, state_time=state_time
        )
        return made

    def config(self, **verify: Any) -> dict[str, Any]:
        label = {"name": "small", "diskimage": IMAGE, "min-ram": 8192}
        place = provider(
            pools=[{"name": "main", "labels": [label]}],
            diskimages=[{"name": IMAGE, "connection-port": self.sshd.port}],
            **{"launch-retries": 1, "max-launch-failures-per-hour": 1},
        )
        options = {"verify": {"ssh-key": str(self.sshd.client_key), **verify}} if verify else {}
        return config(
            place, diskimages=[{"name": IMAGE, "elements": ["x"], "username": USER, **options}]
        )

    def hold_back(self, state_time: float = 2000.0) -> ImageUpload:
        """Store a new upload as a builder does."""
        zk = self.bench.zk
        new = self.upload(1.0)
        new.state_time, new.state = state_time, "uploading"
        zk.storeImageUpload(IMAGE, new.build_id, PLACE, new, new.id)
        new.state, new.state_time = READY, state_time
        Rollbacks(zk, lambda: 2000.0).hold_back(new)
        return new

    def stored(self, upload: ImageUpload) -> ImageUpload:
        found: ImageUpload | None = self.bench.zk.getImageUpload(
            IMAGE, upload.build_id, PLACE, upload.id
        )
        assert found is not None
        return found

    def used(self) -> str:
        """Return the path of the upload in use, by the rule of 11.0.0 (ZK-11.6)."""
        ready = [each for each in self.bench.zk.readImages().uploads if each.state == READY]
        return upload_path(max(ready, key=lambda each: each.state_time))

    def verdict(self, upload: ImageUpload) -> str:
        """Wait for the reason why the upload is bad."""
        wait_for(
            lambda: (mark := self.stored(upload).rolled_back) is not None and not mark.unverified,
            40,
            "the result of the verification",
        )
        mark = self.stored(upload).rolled_back
        assert mark is not None and mark.automatic and self.used() == upload_path(self.old)
        return mark.reason

    def problems(self, launcher: Any) -> list[str]:
        return [str(problem) for problem in launcher.verification.problems()]

    def left(self) -> list[str]:
        """Return what the verifications have left."""
        requests = [each for each in self.bench.zk.readRequests() if each.requestor == VERIFIER]
        nodes = [each for each in self.bench.zk.readNodes() if each.requestor == VERIFIER]
        return [str(each) for each in (*requests, *nodes)]

    def all_gone(self) -> None:
        wait_for(lambda: self.left() == [], what="the end of the machine")


@pytest.fixture
def scene(
    bench: LauncherBench, sshd: SSHServer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Scene:
    make = FakeOpenStackCloud._make_server

    def reachable(*args: Any) -> Any:
        server = make(*args)
        server["addresses"] = {"public": [{"version": 4, "addr": "127.0.0.1"}]}
        server["public_v4"] = server["private_v4"] = server["interface_ip"] = "127.0.0.1"
        return server

    monkeypatch.setattr(FakeOpenStackCloud, "_make_server", reachable)
    monkeypatch.setattr("nodepool.launcher.verification.RETRY", Backoff(0.1, 0.1))
    monkeypatch.setattr("nodepool.launcher.verification.LOGIN_AGAIN", 0.1)
    bench.quota(instances=9)
    return Scene(bench, sshd, tmp_path)


@pytest.mark.spec("BLD-25.1; BLD-25.3")
def test_good_upload_is_used_once_its_machine_has_run_the_command(scene: Scene) -> None:
    new, ran = scene.hold_back(), scene.tmp / "ran"
    assert scene.used() == upload_path(scene.old)
    scene.bench.start(scene.config(command=f"echo $SSH_CONNECTION > '{ran}'"))
    wait_for(lambda: scene.used() == upload_path(new), what="the new upload")
    assert ran.read_text().endswith(f"{scene.sshd.port}\n")
    stored, old = scene.stored(new), scene.stored(scene.old)
    assert (stored.rolled_back, stored.state_time, old.state_time) == (None, 2000.0, 1000.0)
    scene.all_gone()
    _request, (node,) = scene.bench.fulfilled("small")
    assert node.image_id == upload_path(new)


@pytest.mark.spec("BLD-25.4")
def test_upload_whose_command_fails_is_not_used_and_a_problem_shows_why(scene: Scene) -> None:
    new = scene.hold_back()
    launcher = scene.bench.start(scene.config(command="echo no python; exit 3"))
    assert scene.verdict(new) == "its command has ended with status 3: no python"
    scene.all_gone()
    _ready, details = launcher.getReadiness()
    (text,) = [each for each in details if "status 3" in each]
    assert f"image {IMAGE}: build {new.build_id} was rolled back to" in text
    assert f"nodepool image-rollforward {IMAGE}" in text
    _request, (node,) = scene.bench.fulfilled("small")
    assert node.image_id == upload_path(scene.old)


@pytest.mark.spec("BLD-25.4")
def test_command_that_does_not_end_makes_the_upload_bad(scene: Scene) -> None:
    new = scene.hold_back()
    scene.bench.start(scene.config(command="sleep 600", timeout=8))  # time for the login
    assert scene.verdict(new) == "its command has not ended within 8 s"
    scene.all_gone()


@pytest.mark.spec("BLD-25.4")
def test_upload_that_nobody_can_log_in_to_is_not_used(scene: Scene) -> None:
    new, other = scene.hold_back(), scene.tmp / "other"
    with ssh_server(kinds=["ed25519"]) as server:
        server.client_key.rename(other)
        # Another key than the machine knows.
        other.write_bytes((server.folder / "host_ed25519").read_bytes())
    scene.bench.start(scene.config(**{"ssh-key": str(other), "timeout": 2}))
    assert scene.verdict(new).startswith(f"cannot log in as {USER}: ")


@pytest.mark.spec("BLD-25.4")
def test_command_that_does_not_end_is_not_reported_as_a_refused_login(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """The machine installs the key only after the first login."""
    caplog.set_level("DEBUG", "nodepool.Verification")
    new, key = scene.hold_back(), scene.tmp / "key"
    write_key(key, scene.sshd.folder / "host_ed25519")
    scene.bench.start(scene.config(command="sleep 600", timeout=3, **{"ssh-key": str(key)}))
    wait_for(lambda: "cannot be logged in to yet" in caplog.text, what="the refused login")
    write_key(key, scene.sshd.client_key)
    assert scene.verdict(new) == "its command has not ended within 3 s"


def write_key(path: pathlib.Path, source: pathlib.Path) -> None:
    new = path.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_bytes(source.read_bytes())
    new.rename(path)


@pytest.mark.spec("BLD-25.4")
def test_server_that_closes_all_connections_is_reported_as_a_refused_login(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = scene.hold_back()
    with socket.create_server(("127.0.0.1", 0)) as silent, closing(silent):
        port = silent.getsockname()[1]
        monkeypatch.setattr(
            "nodepool.launcher.verification.machine",
            lambda node: dataclasses.replace(machine(node), port=port, host_keys=[]),
        )
        scene.bench.start(scene.config(command="true", timeout=2))
        text = scene.verdict(new)
    assert text.startswith(f"cannot log in as {USER}: ") and "onnection" in text


@contextlib.contextmanager
def closing(server: socket.socket) -> Iterator[None]:
    """Close each connection to a server."""

    def run() -> None:
        with contextlib.suppress(OSError):
            while True:
                server.accept()[0].close()

    thread = threading.Thread(target=run, name="closing")
    thread.start()
    try:
        yield
    finally:
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def break_machines(scene: Scene, new: ImageUpload, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no machine of the new upload start."""
    create = FakeOpenStackCloud.create_server

    def broken(cloud: Any, *args: Any, **kw: Any) -> Any:
        server = create(cloud, *args, **kw)
        if kw["image"]["id"] == "bad":
            server.status = "ERROR"
            server.becomes("ERROR", 0.0)
        return server

    new.external_id, new.rolled_back = "bad", scene.stored(new).rolled_back
    scene.bench.zk.storeImageUpload(IMAGE, new.build_id, PLACE, new, new.id)
    monkeypatch.setattr(FakeOpenStackCloud, "create_server", broken)


@pytest.mark.spec("BLD-25.4; BLD-25.5")
def test_upload_whose_machines_do_not_start_is_bad_and_counts_against_no_label(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = scene.hold_back()
    break_machines(scene, new, monkeypatch)
    launcher = scene.bench.start(scene.config(command="true"))
    assert "its machines do not start, see `nodepool explain request" in scene.verdict(new)
    scene.all_gone()
    assert launcher.state.launch_failures.problems(launcher.config) == []
    scene.bench.fulfilled("small")


@pytest.mark.spec("BLD-25.6")
def test_operator_uses_the_upload_without_waiting_for_its_verification(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, going_on, create = scene.hold_back(), threading.Event(), FakeApi.create_server
    monkeypatch.setattr(
        FakeApi, "create_server", lambda *args, **kw: going_on.wait(60) and create(*args, **kw)
    )
    scene.bench.start(scene.config(command="true"))
    wait_for(lambda: scene.left() != [], what="the request")
    Rollbacks(scene.bench.zk, lambda: 3000.0).forward(IMAGE, None)
    going_on.set()
    scene.all_gone()
    mark = scene.stored(new).rolled_back
    assert scene.used() == upload_path(new) and mark is not None and mark.undone


@pytest.mark.spec("BLD-25.7")
def test_machine_of_a_dead_verification_is_given_to_nobody(scene: Scene) -> None:
    scene.bench.start(scene.config())
    new = scene.hold_back()
    node = scene.bench.ready_node(
        PLACE,
        "main",
        "small",
        allocated_to="300-0000009999",
        requestor=VERIFIER,
        image_id=upload_path(new),
    )
    scene.bench.wait_gone(node.id)


@pytest.mark.spec("BLD-25.7")
def test_another_launcher_continues_after_the_death_of_the_first(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, trying, tries = scene.hold_back(), threading.Event(), []
    attempt = Verification._try

    def first_hangs(verification: Verification, *args: Any) -> Any:
        tries.append(verification)
        if verification is first.verification:
            trying.set()
            first.stopped.wait(60)
            raise ConnectionError("the launcher ends")
        return attempt(verification, *args)

    monkeypatch.setattr(Verification, "_try", first_hangs)
    settings = scene.config(command="true")
    first = scene.bench.make(settings)
    first.start()
    scene.bench.wait_ready(first)
    assert trying.wait(30)
    second = scene.bench.start(settings)
    assert tries == [first.verification]
    scene.bench.stop(first)
    wait_for(lambda: scene.used() == upload_path(new), what="the new upload")
    assert second.verification in tries
    scene.all_gone()


@pytest.mark.spec("BLD-25.7")
def test_request_whose_creation_was_not_answered_is_deleted(scene: Scene) -> None:
    launcher = scene.bench.start(scene.config(command="true"))

    def request(zk: ZooKeeper) -> str:
        made = NodeRequest()
        made.state, made.requestor, made.reuse = "requested", VERIFIER, False
        made.requestor_data, made.provider = {UPLOAD: upload_path(scene.old)}, PLACE
        made.node_types = ["small"]
        zk.storeNodeRequest(made, "300")
        return str(made.id)

    other, lost = request(scene.bench.zk), request(launcher.zk)
    wait_for(lambda: scene.bench.zk.getNodeRequest(lost) is None, what="its deletion")
    assert scene.bench.zk.getNodeRequest(other) is not None


@pytest.mark.spec("BLD-25.2")
@pytest.mark.parametrize("with_image", [True, False])
def test_launcher_without_the_option_does_not_use_an_unverified_upload(
    scene: Scene, with_image: bool
) -> None:
    new = scene.hold_back()
    launcher = scene.bench.start(scene.config() if with_image else config(provider()))
    if with_image:
        wait_for(lambda: scene.problems(launcher) != [], what="the problem")
        assert "has no option `verify` of the image" in scene.problems(launcher)[0]
    else:
        assert launcher.verification._waiting() == {} and scene.problems(launcher) == []
    mark = scene.stored(new).rolled_back
    assert scene.used() == upload_path(scene.old) and mark is not None and mark.unverified


@pytest.mark.spec("BLD-25.5")
def test_refused_creations_of_the_cloud_do_not_blame_the_image(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, refused = scene.hold_back(), []

    def refuse(*_args: Any, **_kw: Any) -> Any:
        refused.append(1)
        raise RuntimeError("503 Service Unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(FakeOpenStackCloud, "create_server", refuse)
        scene.bench.start(scene.config(command="true"))
        wait_for(lambda: len(refused) > MOST_FAILURES, what="more refusals than bad machines")
    wait_for(lambda: scene.used() == upload_path(new), what="the new upload")


@pytest.mark.spec("BLD-25.4")
@pytest.mark.parametrize("times", [1, 2])
def test_machine_that_dies_during_the_command_is_followed_by_another(
    scene: Scene, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the second one blames the image; what a server has not sent when it dies is lost."""
    new, ran, seen = scene.hold_back(), scene.tmp / "ran", scene.tmp / "seen"

    class Seen(Kept):
        def write(self, data: bytes) -> None:
            super().write(data)
            if b"begun" in self.content():
                seen.touch()

    monkeypatch.setattr("nodepool.ssh.Kept", Seen)
    dies = (
        f"echo >> '{ran}'; [ $(wc -l < '{ran}') -le {times} ] || exit 0; rm -f '{seen}'; "
        f"echo begun >&2; until [ -e '{seen}' ]; do sleep 0.01; done; "
        "kill -9 $(ps -o ppid= -p $PPID)"
    )
    scene.bench.start(scene.config(command=dies))
    if times == 1:
        wait_for(lambda: scene.used() == upload_path(new), what="the new upload")
    else:
        assert "the connection was lost before the program ended" in scene.verdict(new)
    assert ran.read_text() == 2 * "\n"


@pytest.mark.spec("BLD-25.7")
def test_end_of_the_launcher_blames_no_image_whose_shell_has_no_frame(scene: Scene) -> None:
    new, ran = scene.hold_back(), scene.tmp / "ran"
    settings = scene.config(command=f"touch '{ran}'; sleep 600")
    settings["diskimages"][0]["shell-type"] = "cmd"
    launcher = scene.bench.start(settings)
    wait_for(ran.exists, what="the command")
    scene.bench.stop(launcher)
    mark = scene.stored(new).rolled_back
    assert mark is not None and mark.unverified


@pytest.mark.spec("BLD-25.5")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ssh-key": "/none/key"}, "cannot read the key /none/key"),
        ({"max-hold-age": 60}, "max-hold-age is shorter than the timeout of 600 s"),
        ({"label": "large"}, "no pool of the provider has label large with this image"),
    ],
)
def test_verification_that_cannot_be_done_is_a_problem_with_a_remedy(
    scene: Scene, options: dict[str, Any], words: str
) -> None:
    new = scene.hold_back()
    top = {key: options.pop(key) for key in ("max-hold-age",) if key in options}
    launcher = scene.bench.start(scene.config(command="true", **options) | top)
    wait_for(lambda: scene.problems(launcher) != [], what="the problem")
    (text,) = scene.problems(launcher)
    assert words in text and f"image-rollforward {IMAGE} --provider {PLACE}" in text
    mark = scene.stored(new).rolled_back
    assert scene.used() == upload_path(scene.old) and mark is not None and mark.unverified


@pytest.mark.spec("BLD-25.1")
def test_newer_upload_replaces_one_that_waits(scene: Scene) -> None:
    first, second = scene.hold_back(2000.0), scene.hold_back(3000.0)
    scene.bench.start(scene.config(command="true"))
    wait_for(lambda: scene.used() == upload_path(second), what="the newest upload")
    mark = scene.stored(first).rolled_back
    assert mark is not None and mark.unverified
    scene.all_gone()
    for node in scene.bench.nodes(state=USED):
        assert node.image_id == upload_path(second)


@pytest.mark.spec("BLD-25.8")
def test_first_upload_is_verified_before_any_request_gets_it(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.bench.zk.deleteUpload(IMAGE, scene.old.build_id, PLACE, scene.old.id)
    new, gate = scene.hold_back(), scene.tmp / "gate"
    given = scene.config(command=f"until [ -e '{gate}' ]; do sleep 0.1; done", timeout=600)
    scene.bench.start(given)
    shell = Shell(scene.bench.config(given), capsys)
    refused = scene.bench.submit("small")
    scene.bench.wait_request(refused, "failed")
    text = f"build {new.build_id} is held back until it is verified"
    for command in (
        ("explain", "request", refused),
        ("explain", "image", IMAGE),
        ("explain", "label", "small"),
        ("problem-list",),
    ):
        assert text in shell(*command), command
    gate.touch()
    wait_for(lambda: scene.stored(new).rolled_back is None, 40, "the result")
    scene.all_gone()
    _request, (node,) = scene.bench.fulfilled("small")
    assert node.image_id == upload_path(new)


@pytest.mark.spec("BLD-25.8")
def test_bad_first_upload_is_one_problem_with_its_remedy(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was true when a request was declined is not shown any more."""
    scene.bench.zk.deleteUpload(IMAGE, scene.old.build_id, PLACE, scene.old.id)
    new, gate = scene.hold_back(), scene.tmp / "gate"
    given = scene.config(command=f"until [ -e '{gate}' ]; do sleep 0.1; done; exit 4", timeout=600)
    scene.bench.start(given)
    scene.bench.wait_request(scene.bench.submit("small"), "failed")
    gate.touch()
    wait_for(lambda: not scene.stored(new).rolled_back.unverified, 40, "the result")
    shell = Shell(scene.bench.config(given), capsys)
    text = f"build {new.build_id} is held back by verification: its command has ended with status 4"

    def rows() -> list[str]:
        found = [row["problem"] for row in json.loads(shell("problem-list", "--json"))]
        return [row for row in found if str(new.build_id) in row]

    # Until its next report, the launcher also says why the request was declined.
    wait_for(lambda: len(rows()) == 1, what="one problem")
    assert f"{text}. Suggestion: repair the image" in rows()[0]


@pytest.mark.spec("BLD-25.5")
def test_machine_of_another_image_proves_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher of 11.0.0 has served the request with the image in use."""
    monkeypatch.setattr(
        "nodepool.driver.statemachine.launcher.upload_of", lambda *_args: scene.stored(scene.old)
    )
    new = scene.hold_back()
    launcher = scene.bench.start(scene.config(command="true"))
    wait_for(lambda: scene.problems(launcher) != [], what="the problem")
    assert "a launcher of another release" in scene.problems(launcher)[0]
    mark = scene.stored(new).rolled_back
    assert scene.used() == upload_path(scene.old) and mark is not None and mark.unverified


@pytest.mark.spec("BLD-25.1")
@pytest.mark.parametrize("way", ["does not boot", "no SSH", "other host key", "command", "hangs"])
def test_no_request_gets_a_machine_of_a_broken_image(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """With 200 requests for each way in which an image is broken, 1,000 in all."""
    scene.bench.quota(cores=1000, instances=250, ram=10**7)
    new = scene.hold_back()
    options: dict[str, Any] = {"timeout": 3}
    if way == "does not boot":
        break_machines(scene, new, monkeypatch)
    elif way == "no SSH":
        options["ssh-key"] = str(scene.sshd.folder / "host_ed25519")
    elif way == "other host key":
        with ssh_server(kinds=["ecdsa256"]) as server:
            (key,) = server.host_keys
        monkeypatch.setattr(
            "nodepool.launcher.verification.machine",
            lambda node: dataclasses.replace(machine(node), host_keys=[key]),
        )
    else:
        options["command"] = "exit 1" if way == "command" else "sleep 600"
    settings = scene.config(**options)
    settings["providers"][0]["pools"][0]["host-key-checking"] = False
    scene.bench.start(settings)
    requests = [scene.bench.submit("small") for _ in range(200)]
    scene.verdict(new)
    nodes = [scene.bench.wait_request(each, "fulfilled")["nodes"][0] for each in requests]
    images = {scene.bench.node(node).image_id for node in nodes}
    assert len(nodes) == 200 and images == {upload_path(scene.old)}
