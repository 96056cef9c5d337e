"""The daemon for Gitea and Forgejo: how many runners are needed, what is cleaned up, webhooks,
and its configuration.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import pathlib
import textwrap
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from nodepool.adapters.gitea import instance as instance_module
from nodepool.adapters.gitea import program
from nodepool.adapters.gitea.api import Api, Job, Registration
from nodepool.adapters.gitea.instance import STRAY, SWEEP, Instance, Runners
from nodepool.adapters.runners.forge import ForgeError, Kind
from nodepool.adapters.runners.program import ConfigError, Listener, Pools, read_config
from nodepool.adapters.runners.runner import BUSY, IDLE, STARTING, Runner
from tests import REPOSITORY

TOKEN, SECRET = "0123456789abcdef", "webhook-secret"


class Recorded:
    """A forge without a network."""

    command = "runner daemon"

    def __init__(self, binds: bool = False) -> None:
        self.binds = binds
        self.no_job: tuple[int, ...] = ()
        self.reads = 0
        self.jobs: list[Job] = []
        self.known: list[Any] = []
        self.removed: list[int] = []
        self.registered: list[tuple[str, Job | None]] = []
        self.existing: set[int] = set()

    def queue(self) -> list[Job]:
        return self.jobs

    def runners(self) -> list[Any]:
        self.reads += 1
        return self.known

    def register(self, name: str, labels: Any, job: Job | None) -> tuple[int, bytes]:
        self.registered.append((name, job))
        return len(self.registered), b"secret"

    def exists(self, runner: int) -> bool:
        return runner in self.existing

    def remove(self, runner: int) -> bool:
        self.removed.append(runner)
        return True

    def script(self, command: str, labels: Any) -> str:
        return command


def fleet_of(api: Api, least: int = 0, labels: tuple[str, ...] = ("noble:host",)) -> Runners:
    kind = Kind("main/noble", "noble", most=5, least=least)
    return Runners(
        kind, api, labels, "runner daemon", Pools({}, "nodepool-gitea"), threading.Event()
    )


def with_runners(
    runners: Runners, monkeypatch: pytest.MonkeyPatch, **states: str
) -> dict[str, Runner]:
    """Let a fleet have runners in these states."""
    found = {name: Runner(runners.fleet, name) for name in states}
    for name, state in states.items():
        found[name].enter(state)
    monkeypatch.setattr(runners.fleet, "runners", lambda: list(found.values()))
    monkeypatch.setattr(runners.fleet, "find", found.get)
    return found


def free(runners: Runners) -> int | None:
    """Return how many runners the fleet needs beyond the busy ones."""
    busy = sum(runner.state == BUSY for runner in runners.fleet.runners())
    return None if runners.fleet.wanted is None else runners.fleet.wanted - busy


NOBLE = frozenset({"noble"})


@pytest.mark.spec("Gitea 2: desired number per label set = queued jobs with exactly that set")
def test_jobs_with_other_labels_are_not_counted() -> None:
    runners = fleet_of(Recorded(), labels=("gpu:host", "self-hosted:host"))
    labels = [{"self-hosted", "gpu"}, {"gpu"}, {"noble"}, {"self-hosted", "gpu", "big"}]
    runners.update([Job(number, "a", frozenset(each)) for number, each in enumerate(labels)])
    assert free(runners) == 1


def test_warm_runners_are_kept_without_jobs_and_are_not_added_to_those() -> None:
    runners = fleet_of(Recorded(), least=2)
    runners.update([])
    assert free(runners) == 2
    runners.update([Job(number, "a", NOBLE) for number in range(3)])
    assert free(runners) == 3


def test_runner_that_has_a_job_is_busy_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    runners = fleet_of(Recorded())
    found = with_runners(runners, monkeypatch, **{"np-a": IDLE, "np-b": IDLE})
    runners.update([Job(1, "check", NOBLE, "np-a"), Job(2, "other", NOBLE, "another")])
    assert [(each.state, each.job) for each in found.values()] == [(BUSY, "check"), (IDLE, "")]
    runners.update([])
    assert found["np-a"].state == BUSY


@pytest.mark.spec("Forgejo 6: a runner is made for one job; on status 2 look at the queue again")
def test_each_forgejo_job_gets_one_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Recorded(binds=True)
    runners = fleet_of(api)
    jobs = [Job(2, "two", NOBLE, handle="h-2"), Job(1, "one", NOBLE, handle="h-1")]
    runners.update(jobs)
    assert free(runners) == 2
    found = with_runners(runners, monkeypatch, **{"np-a": STARTING, "np-b": STARTING})
    runners.register("np-a")
    assert api.registered == [("np-a", jobs[1])], "the oldest first"
    assert (found["np-a"].state, found["np-a"].job, free(runners)) == (BUSY, "one", 1)
    runners.update(jobs)
    assert free(runners) == 1, "the first one has its runner, although the forge still lists it"
    runners.register("np-b")
    assert api.registered[1][1] == jobs[0]
    del found["np-a"]
    runners.update(jobs[1:])
    assert free(runners) == 1, "its runner has ended without it"


def test_registration_that_a_killed_daemon_left_is_replaced() -> None:
    api = Recorded()
    runners = fleet_of(api)
    api.known = [registration(7, "np-a"), registration(8, "np-b")]
    instance = instance_of(api, runners)
    runners.register("np-c")
    assert api.removed == []
    instance.sweep()
    runners.register("np-a")
    assert api.removed == [7]


def registration(number: int, name: str, online: bool = False) -> Any:
    return Registration(number, name, online)


@pytest.mark.spec("Forgejo 6: status 2 without a job is no failure")
def test_forgejo_runner_without_a_job_is_no_failure() -> None:
    api = Recorded(binds=True)
    api.no_job = (2,)
    assert fleet_of(api).failure(2) is None


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, None),
        (1, "runner ended with status 1"),
        (2, "runner ended with status 2"),
        (None, "runner was killed"),
        (127, "runner is not in PATH on the node"),
    ],
)
def test_end_of_the_program_is_understood(status: int | None, text: str | None) -> None:
    failure = fleet_of(Recorded()).failure(status)
    assert failure is None if text is None else failure is not None and text in failure[0]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(instance_module, "time", made)
    return made


def instance_of(api: Api, runners: Runners, secret: str | None = None) -> Instance:
    current = None if secret is None else lambda: secret
    return Instance("main", api, [runners], 5.0, threading.Event(), current)


@pytest.mark.spec(
    "Gitea 3.4, Forgejo 6: registrations with our prefix and without a lease, seen again: removed"
)
def test_registration_without_a_lease_is_removed_later(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Recorded()
    runners = fleet_of(api)
    with_runners(runners, monkeypatch, **{"np-ours": IDLE})
    api.known = [
        registration(1, "np-ours"),
        registration(2, "np-stray"),
        registration(3, "np-online", True),
        registration(4, "else"),
    ]
    instance = instance_of(api, runners)
    for _ in range(int(STRAY / SWEEP) + 1):
        instance.sweep()
        assert api.removed == []
        clock.now += SWEEP
    clock.now += 1
    instance.sweep()
    assert api.removed == [2]


def test_registrations_are_not_read_at_each_poll(clock: Clock) -> None:
    api = Recorded()
    instance = instance_of(api, fleet_of(api))
    for _ in range(11):
        instance.sweep()
        clock.now += SWEEP / 10
    assert api.reads == 2


def test_registrations_are_kept_while_the_leases_are_unknown(clock: Clock) -> None:
    api = Recorded()
    runners = fleet_of(api)
    api.known = [registration(2, "np-stray")]
    runners.fleet.trouble = "the launcher does not answer"
    instance = instance_of(api, runners)
    instance.sweep()
    clock.now += STRAY + 1
    instance.sweep()
    assert api.removed == []


def test_presence_of_a_runner_is_that_of_the_list_or_of_its_registration(clock: Clock) -> None:
    """Gitea sorts its runners by the time of their last call: while one page is read, some move
    to the page before.
    """
    api = Recorded()
    runners = fleet_of(api)
    instance = instance_of(api, runners)
    runners.register("np-a")
    api.existing = {1}
    assert runners.presence("np-a") is False and runners.presence("np-b") is None
    api.known = [Registration(1, "np-a", True), Registration(2, "np-b", False)]
    instance.sweep()
    assert runners.presence("np-a") is True and runners.presence("np-b") is False
    api.known = []
    clock.now += SWEEP
    instance.sweep()
    assert runners.presence("np-b") is None


@pytest.mark.parametrize(("binds", "finished"), [(False, True), (True, False)])
def test_job_that_the_queue_no_longer_has_is_finished(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, binds: bool, finished: bool
) -> None:
    runners = fleet_of(Recorded(binds))
    found = with_runners(runners, monkeypatch, **{"np-a": BUSY, "np-b": BUSY, "np-c": IDLE})
    runners.update([Job(1, "check", frozenset(["noble"]), runner="np-a")])
    assert [found[name].finished for name in ("np-a", "np-b", "np-c")] == [False, finished, False]


def test_labels_that_nobody_serves_are_shown_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    api = Recorded()
    runners = fleet_of(api)
    instance = instance_of(api, runners)
    api.jobs = [
        Job(1, "a", frozenset({"gpu", "big"})),
        Job(2, "b", frozenset({"gpu", "big"})),
        Job(3, "c", frozenset()),
    ]
    instance.poll()
    instance.poll()
    assert instance.status()[0]["notes"] == [
        "0 jobs wait",
        "not served here: big, gpu (2 jobs)",
        "not served here: no labels (1 jobs)",
    ]
    assert (
        caplog.text.count("jobs wait for the labels big, gpu, which no entry of runners has") == 1
    )


def test_trouble_with_the_queue_is_logged_once_and_so_is_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "nodepool.adapters.gitea")
    monkeypatch.setattr(instance_module, "LEAST", 0.0)
    monkeypatch.setattr(instance_module, "LONGEST", 0.0)
    answers: list[Any] = ["away", "away", "busy", None, None]
    api = Recorded()
    instance = instance_of(api, fleet_of(api))
    instance._interval = 0.0

    def queue() -> list[Job]:
        answer = answers.pop(0)
        if not answers:
            instance._stopping.set()
        if answer is not None:
            raise ForgeError(answer)
        return []

    monkeypatch.setattr(api, "queue", queue)
    instance._serve()
    assert [record.getMessage() for record in caplog.records] == [
        "main: the queue cannot be read: away",
        "main: the queue cannot be read: busy",
        "main: the queue is read",
    ]


# -- webhook


def signed(body: bytes, secret: str = SECRET) -> str:
    return hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


BODY = b'{"action": "queued", "workflow_job": {"id": 1}}'


@pytest.mark.spec(
    "Gitea 4: the signature is checked; without a secret all are refused; nothing is taken from "
    "the body"
)
@pytest.mark.parametrize(
    ("secret", "body", "signature", "event", "status", "wakes"),
    [
        (SECRET, BODY, signed(BODY), "workflow_job", 204, True),
        (SECRET, BODY, signed(BODY), "push", 204, False),
        (
            SECRET,
            b'{"action": "completed"}',
            signed(b'{"action": "completed"}'),
            "workflow_job",
            204,
            False,
        ),
        (SECRET, b"[]", signed(b"[]"), "workflow_job", 400, False),
        (SECRET, BODY, signed(BODY, "another"), "workflow_job", 403, False),
        (SECRET, BODY, signed(BODY).upper(), "workflow_job", 403, False),
        (SECRET, BODY, "", "workflow_job", 403, False),
        (SECRET, BODY, "\xe4", "workflow_job", 403, False),
        (None, BODY, "", "workflow_job", 403, False),
        (None, BODY, signed(BODY, ""), "workflow_job", 403, False),
    ],
)
def test_webhook_wakes_only_with_the_right_signature(
    secret: str | None,
    body: bytes,
    signature: str,
    event: str,
    status: int,
    wakes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = instance_of(Recorded(), fleet_of(Recorded()), secret)
    woken: list[bool] = []
    monkeypatch.setattr(found, "wake", lambda: woken.append(True))
    headers = {"X-Gitea-Event": event, "X-Gitea-Signature": signature}
    assert found.receive(headers, body) == status
    assert bool(woken) is wakes
    assert found.receive({"X-Gitea-Event": event}, body) == 403


# -- configuration


def config(tmp_path: pathlib.Path, **changes: Any) -> Mapping[str, Any]:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    entry = {
        "name": "main",
        "url": "https://gitea.example.com",
        "token-file": str(token),
        "runners": [{"runs-on": "noble"}],
    }
    path = tmp_path / "gitea.yaml"
    path.write_text(yaml.safe_dump({"instances": [{**entry, **changes}]}))
    return read_config(str(path), program.SCHEMA)


def service_of(tmp_path: pathlib.Path, **changes: Any) -> program.Gitea:
    return program.Gitea(
        config(tmp_path, **changes), Pools({}, "nodepool-gitea"), threading.Event()
    )


def test_smallest_configuration_has_the_defaults_of_gitea(tmp_path: pathlib.Path) -> None:
    [fleet] = service_of(tmp_path).fleets
    assert fleet.kind == Kind(
        "main/noble",
        "noble",
        most=10,
        job_time=11400.0,
        idle=600.0,
        home="https://gitea.example.com/",
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"url": "gitea.example.com"}, "a URL such as https://gitea.example.com"),
        ({"scope": "acme"}, "user, orgs/NAME, or repos/OWNER/NAME"),
        ({"runners": [{"runs-on": ["a", "b"]}]}, "main: runners: runs-on a, b: label is missing"),
        (
            {
                "runners": [
                    {"runs-on": ["a", "b"], "label": "x"},
                    {"runs-on": ["b", "a"], "label": "y"},
                ]
            },
            "runs-on b, a is there twice",
        ),
        (
            {"runners": [{"runs-on": "noble", "min": 3, "max": 2}]},
            r"main/noble: min \(3\) is above max \(2\)",
        ),
        ({"runners": [{"runs-on": "noble:host"}]}, "a label without ':'"),
        ({"runners": []}, "length of value must be at least 1"),
        (
            {"type": "forgejo", "runners": [{"runs-on": "noble", "min": 1}]},
            "min: runners of forgejo are made for a job",
        ),
        (
            {"type": "forgejo", "webhook-secret-file": "/dev/null"},
            "forgejo sends no messages about jobs",
        ),
        ({"type": "gogs"}, "value must be one of"),
        ({"interval": "0.1s"}, "value must be at least 1"),
        ({"token-file": "/no/such/file"}, "/no/such/file: "),
    ],
)
def test_wrong_configuration_is_refused_with_the_place(
    tmp_path: pathlib.Path, changes: Any, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        service_of(tmp_path, **changes)


def test_example_of_the_manual_is_correct(tmp_path: pathlib.Path) -> None:
    page = (REPOSITORY / "doc" / "operation" / "gitea.rst").read_text()
    example = page.partition(".. code-block:: yaml\n\n")[2].partition("\n\n3. ")[0]
    path = tmp_path / "gitea.yaml"
    path.write_text(textwrap.dedent(example))
    [instance] = read_config(str(path), program.SCHEMA)["instances"]
    assert [one["label"] for one in instance["runners"]] == ["small-noble", "small-jammy"]


def test_check_reports_a_correct_and_a_wrong_file(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config(tmp_path)
    path = tmp_path / "gitea.yaml"
    assert program.main(["--config", str(path), "check"]) == 0
    assert capsys.readouterr().out == f"{path}: correct\n"
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(SystemExit, match="can be read by everyone"):
        program.main(["--config", str(path), "check"])


@pytest.mark.parametrize("length", [str((1 << 20) + 1), "-1", "x"])
def test_message_without_a_usable_length_is_not_read(tmp_path: pathlib.Path, length: str) -> None:
    listener = Listener("127.0.0.1:0", service_of(tmp_path), "nodepool-gitea")
    listener.start()
    connection = http.client.HTTPConnection("127.0.0.1", listener.port, timeout=30)
    try:
        connection.putrequest("POST", "/webhook/main")
        connection.putheader("Content-Length", length)
        connection.endheaders()
        assert connection.getresponse().status == 413
    finally:
        connection.close()
        listener.stop()


def test_webhooks_reach_their_instance_only(tmp_path: pathlib.Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    service = service_of(tmp_path, **{"webhook-secret-file": str(secret)})
    headers = {"x-gitea-event": "workflow_job", "x-gitea-signature": signed(BODY)}
    assert [
        service.receive(path, headers, BODY)
        for path in ("/webhook/main", "/webhook/other", "/main", "/webhook/")
    ] == [204, 404, 404, 404]
