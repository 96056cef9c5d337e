"""Poison is contained, whatever it is: arbitrary records, configurations and errors of drivers
alongside good requests.

Short by default; ``NODEPOOL_POISON_SECONDS=3600`` lets each search continue for that long, with
other examples each time.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from kazoo.exceptions import NoNodeError

from nodepool.cmd import nodepoolcmd
from nodepool.config.live.file_status import ConfigFileStatus
from nodepool.exceptions import ConfigurationError
from nodepool.zk import paths
from tests.conftest import wait_for
from tests.integration.launcher.safety.test_problems import listed
from tests.support.launcher import LauncherBench, config, provider

SECONDS = float(os.environ.get("NODEPOOL_POISON_SECONDS", "0"))
#: The same examples in each run, but for the long one; nothing is gained by making an example
#: smaller that takes a second.
SEARCH = settings(
    max_examples=25,
    deadline=None,
    derandomize=not SECONDS,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def again_and_again(search: Callable[[], None]) -> None:
    """Once, or for this many seconds."""
    begun = time.monotonic()
    search()
    while time.monotonic() - begun < SECONDS:
        search()


# Threads of the launcher draw random numbers while an example is made.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning"
)

# --- records in ZooKeeper
# -----------------------------------------------------------------------------------------------

NUMBERS = st.sampled_from(
    [
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "-1e999",
        "1" + "0" * 5000,
        "-0.0",
        "1.5",
        "-1",
        "0",
        str(2**63),
        "1e308",
    ]
)
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "",
            "/",
            "..",
            "a/b",
            "\0",
            "\ud800",
            "x" * 100_000,
            "é" * 300,
            "requested",
            "ready",
            "deleting",
            "fulfilled",
            "fake-label",
            "fake-provider",
            "main",
            "min-ready",
            "0000000000",
        ]
    ),
).map(json.dumps)
DEEP = st.sampled_from(["[" * 100_000, "[" * 5000 + "]" * 5000, '{"a":' * 5000 + "1" + "}" * 5000])
LEAVES = st.one_of(
    NUMBERS,
    TEXTS,
    st.sampled_from(["null", "true", "false", "[]", "{}", '{"a": [1]}', '[[["a"]]]']),
)
VALUES = st.one_of(
    LEAVES,
    LEAVES,
    LEAVES,
    DEEP,
    st.lists(LEAVES, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
    st.dictionaries(TEXTS, LEAVES, max_size=3).map(
        lambda items: "{" + ", ".join(f"{key}: {value}" for key, value in items.items()) + "}"
    ),
)

NOW = time.time()
log = logging.getLogger("nodepool.test")
#: A good record of each kind; their fields get odd values.
RECORDS: dict[str, dict[str, Any]] = {
    "request": {
        "node_types": ["poison-label"],
        "requestor": "poison",
        "created_time": NOW,
        "provider": None,
        "state": "requested",
        "state_time": NOW,
        "relative_priority": 0,
        "event_id": "e",
        "tenant_name": None,
        "requestor_data": None,
        "declined_by": [],
        "nodes": [],
        "reuse": True,
    },
    "node": {
        "state": "ready",
        "state_time": NOW,
        "created_time": NOW,
        "provider": "fake-provider",
        "pool": "main",
        "launcher": "l",
        "type": ["poison-label"],
        "allocated_to": None,
        "external_id": "x",
        "interface_ip": "192.0.2.1",
        "host_keys": [],
        "connection_port": 22,
        "connection_type": "ssh",
        "tenant_name": None,
        "requestor": None,
        "resources": None,
        "attributes": None,
        "slot": None,
        "hold_expiration": None,
        "hold_job": None,
        "comment": None,
        "user_data": None,
        "driver_data": None,
        "cloud": "c",
        "az": None,
        "region": None,
        "username": "zuul",
        "python_path": "auto",
    },
    "build": {
        "state": "ready",
        "state_time": NOW,
        "builder": "b",
        "builder_id": "i",
        "formats": "qcow2",
        "username": "zuul",
        "python_path": "auto",
        "shell_type": None,
    },
    "upload": {
        "state": "ready",
        "state_time": NOW,
        "external_id": "x",
        "external_name": "n",
        "format": "qcow2",
        "username": "zuul",
        "python_path": "auto",
        "shell_type": None,
    },
    "pool": {
        "hostname": "h",
        "id": "x-PoolWorker.y-z",
        "provider_name": "fake-provider",
        "supported_labels": ["other-label"],
        "priority": 100,
        "paused": True,
        "state": "running",
    },
    "launcher": {"hostname": "h", "state": "running", "problems": []},
    "builder": {"hostname": "h", "id": "b", "state": "running"},
}
PLACES: dict[str, tuple[str, bool]] = {
    "request": (f"{paths.REQUESTS}/100-", True),
    "node": (f"{paths.NODES}/", True),
    "build": (f"{paths.IMAGES}/poison/builds/", True),
    "upload": (f"{paths.uploads('poison', '0000000000', 'fake-provider')}/", True),
    "pool": (f"{paths.COMPONENTS}/pool/h", True),
    "launcher": (f"{paths.COMPONENTS}/launcher/h", True),
    "builder": (f"{paths.COMPONENTS}/builder/h", True),
}


@st.composite
def records(draw: Callable[[Any], Any]) -> tuple[str, bytes]:
    """A kind, and what stands in such a record."""
    kind = draw(st.sampled_from(sorted(RECORDS)))
    shape = draw(st.sampled_from(["fields", "fields", "fields", "value", "bytes", "cut", "big"]))
    if shape == "bytes":
        return kind, draw(st.binary(max_size=40))
    if shape == "value":
        return kind, draw(VALUES).encode("utf-8", "surrogatepass")
    fields = {json.dumps(key): json.dumps(value) for key, value in RECORDS[kind].items()}
    if shape == "big":
        fields['"comment"'] = json.dumps("x" * 900_000)
    for key in draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=3)):
        fields[key] = draw(VALUES)
    text = "{" + ", ".join(f"{key}: {value}" for key, value in fields.items()) + "}"
    data = text.encode("utf-8", "surrogatepass")[:1_000_000]
    return kind, data[: -draw(st.integers(1, len(data)))] if shape == "cut" else data


def living() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def remove(kazoo: Any, path: str) -> None:
    with contextlib.suppress(NoNodeError):
        kazoo.delete(path, recursive=True)


class Search:
    """A launcher that is thrown things at, and must continue."""

    def __init__(self, bench: LauncherBench, whole: dict[str, Any]) -> None:
        self.bench = bench
        self.pool = bench.start(whole)
        self.done = 0
        self.served()
        #: Those that come with the first request do not end after it.
        self.threads = {name for name in living() if not name.startswith("Dummy")}

    def served(self, label: str = "fake-label") -> None:
        """A good request is, and its node goes."""
        request_id, (node,) = self.bench.fulfilled(label)
        self.bench.zuul.cancel(request_id)
        assert node.type == [label]
        self.done += 1

    def alive(self) -> None:
        assert self.pool.is_alive()
        assert self.pool.zk.connected
        # Those of the provider that is thrown things at may go with it.
        kept = (
            "fake-provider",
            "PoolWorker-assignment",
            "NodePool",
            "MinReady",
            "Cleanup",
            "Delete",
        )
        assert not {name for name in self.threads - living() if any(word in name for word in kept)}
        assert self.pool.getReadiness()[0]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodepool.launcher.statistics.INTERNAL_INTERVAL", 0.2)


@pytest.mark.spec("issue 11, 2: arbitrary JSON in each kind of record")
@pytest.mark.timeout(max(300, SECONDS + 300))
def test_arbitrary_records_do_no_harm(
    bench: LauncherBench,
    quick: None,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    search = Search(bench, config(provider()))
    kazoo, file = bench.zk.kazoo_client, str(bench.tmp / "nodepool.yaml")
    session = search.pool.zk.client.session_id

    @SEARCH
    @given(st.lists(records(), min_size=1, max_size=6))
    def one(poison: list[tuple[str, bytes]]) -> None:
        caplog.clear()
        made = []
        for kind, data in poison:
            start, sequence = PLACES[kind]
            made.append(kazoo.create(start, data, sequence=sequence, makepath=True))
        try:
            search.served()
            search.alive()
            trees = search.pool.zk.trees

            def seen() -> bool:
                known = {path for tree in trees for path in (*tree.known_paths(), *tree.bad)}
                return all(
                    path in known or not kazoo.exists(path)
                    for path in made
                    if "/components/" not in path
                )

            wait_for(seen, what=f"each of {poison} is shown, or named as one that cannot be used,")
            bad = [path for tree in trees for path in tree.bad]
            if bad:
                wait_for(
                    lambda: all(f"Ignoring {path}: " in caplog.text for path in bad),
                    what="the log names them",
                )
                wait_for(
                    lambda: all(
                        any(path in row["problem"] for row in listed(bench, capsys)) for path in bad
                    ),
                    what=f"problem-list names {bad}",
                )
            capsys.readouterr()
            for command in (
                "list",
                "request-list",
                "image-list",
                "dib-image-list",
                "image-status",
                "problem-list",
            ):
                assert nodepoolcmd.main(["-c", file, command]) == 0, capsys.readouterr().err
        finally:
            for path in made:
                remove(kazoo, path)
            remove(kazoo, f"{paths.IMAGES}/poison")

    again_and_again(one)
    search.served()
    search.alive()
    assert search.pool.zk.client.session_id == session


# --- configurations
# --------------------------------------------------------------------------------------------------


def everything(work: pathlib.Path) -> dict[str, Any]:
    """One section of most kinds, all of it good."""
    whole = config(
        provider(),
        provider(
            "fake-second",
            labels=["second-label"],
            pool={"max-servers": 4, "node-attributes": {"a": "b"}},
        ),
        {
            "name": "slots",
            "driver": "metastatic",
            "pools": [
                {
                    "name": "main",
                    "labels": [
                        {
                            "name": "slot-label",
                            "backing-label": "second-label",
                            "max-parallel-jobs": 2,
                            "grace-time": 5,
                        }
                    ],
                }
            ],
        },
        labels={"static-label": {"min-ready": 0}},
        **{
            "tenant-resource-limits": [{"tenant-name": "t", "max-servers": 5, "max-cores": 100}],
            "webapp": {"port": 8005, "listen_address": "127.0.0.1"},
            "diskimages": [
                {"name": "image", "elements": ["vm"], "rebuild-age": 3600, "env-vars": {"A": "b"}}
            ],
            "elements-dir": str(work),
            "images-dir": str(work),
            "build-log-retention": 3,
        },
    )
    whole["providers"].append(
        {
            "name": "hosts",
            "driver": "static",
            "pools": [
                {
                    "name": "main",
                    "nodes": [
                        {
                            "name": "127.0.0.1",
                            "labels": "static-label",
                            "username": "zuul",
                            "connection-port": 1,
                            "host-key-checking": False,
                        }
                    ],
                }
            ],
        }
    )
    return whole


ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 10**12),
    st.floats(),
    st.text(max_size=8),
    st.just("x" * 10_000),
    st.sampled_from(
        [
            [],
            {},
            [[]],
            [None],
            {"a": None},
            [{"name": None}],
            {"name": ["x"]},
            "%(NOT_SET)",
            "fake-label",
            "/dev/null",
        ]
    ),
    st.dates(),
    st.binary(max_size=4),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of all values below the top."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in inner:
        yield (*path, key)
        yield from places(each, (*path, key))


def changed(whole: dict[str, Any], path: tuple[Any, ...], how: str, odd: Any) -> dict[str, Any]:
    """The same with one more fault."""
    whole = copy.deepcopy(whole)
    parent: Any = whole
    for key in path[:-1]:
        parent = parent[key]
    if how == "replace":
        parent[path[-1]] = odd
    elif how == "remove":
        del parent[path[-1]]
    elif isinstance(parent, list):
        parent.append(copy.deepcopy(parent[path[-1]]))  # twice
    else:
        parent[f"{path[-1]}x"] = odd  # unknown
    return whole


@st.composite
def faulty(
    draw: Callable[[Any], Any], good: dict[str, Any], inside: str | None = None
) -> dict[str, Any]:
    """One to three faults, of one provider only with its name ``inside``."""
    for _ in range(draw(st.integers(1, 3))):
        found = [
            path
            for path in places(good)
            if inside is None
            or (
                path[0] == "providers"
                and len(path) > 2
                and good["providers"][path[1]].get("name") == inside
                and path[2] != "name"
            )
        ]
        if found:
            good = changed(
                good,
                draw(st.sampled_from(found)),
                draw(st.sampled_from(["replace", "replace", "remove", "more"])),
                draw(ODD),
            )
    return good


@pytest.mark.spec(
    "issue 11, 2 and 3: arbitrary YAML of the right outer shape is good, or is refused with a "
    "reason; so say both"
)
@pytest.mark.timeout(max(300, SECONDS + 300))
def test_arbitrary_configuration_is_valid_or_refused_with_a_reason(
    bench: LauncherBench, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = yaml.safe_load(pathlib.Path(bench.config(everything(tmp_path))).read_text())
    file = tmp_path / "other.yaml"

    @settings(SEARCH, max_examples=300)
    @given(faulty(good))
    def one(content: dict[str, Any]) -> None:
        file.write_text(yaml.safe_dump(content))
        refused = ""
        try:
            ConfigFileStatus([str(file)], log, lambda _stale: None).load()
        except ConfigurationError as error:
            refused = str(error)
        capsys.readouterr()
        status = nodepoolcmd.main(["-c", str(file), "config-validate"])
        told = "".join(capsys.readouterr())
        assert "Traceback" not in told
        assert status == 1 or not refused, (refused, told)

    again_and_again(one)


@pytest.mark.spec(
    "issue 11, 2: a fault of one provider's section stops no request of another, in a launcher "
    "that runs"
)
@pytest.mark.timeout(max(300, SECONDS + 300))
def test_configurations_of_a_launcher_that_runs(
    bench: LauncherBench, tmp_path: pathlib.Path
) -> None:
    whole = everything(tmp_path)
    whole.pop("webapp")
    search = Search(bench, whole)
    file = tmp_path / "nodepool.yaml"
    good = yaml.safe_load(file.read_text())

    def change(content: dict[str, Any]) -> None:
        new = file.with_suffix(".new")
        new.write_text(yaml.safe_dump(content))
        new.replace(file)
        search.served()
        wait_for(
            lambda: search.pool.config_state._validated[0] == [file.read_text()],
            what="the launcher has read the file",
        )

    @settings(SEARCH, max_examples=15)
    @given(faulty(good, inside="fake-second"))
    def one(content: dict[str, Any]) -> None:
        change(content)
        search.served()
        search.alive()

    again_and_again(one)
    change(good)
    wait_for(lambda: any("second-label" in pool.labels for pool in bench.zk.getRegisteredPools()))
    search.served("second-label")


# --- drivers
# --------------------------------------------------------------------------------------------------


class Unspeakable(Exception):
    """Not even its text can be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


ERRORS: dict[str, Callable[[], BaseException]] = {
    "plain": lambda: RuntimeError("induced"),
    "unspeakable": Unspeakable,
    "exit": lambda: SystemExit(3),
    "missing": lambda: KeyError(None),
    "huge": lambda: ValueError("x" * 200_000),
}

#: What a launcher asks of a state machine driver all the time, and what besides.
ASKED = ("getCreateStateMachine", "getDeleteStateMachine", "listResources")
MORE = (
    "getQuotaForLabel",
    "listInstances",
    "findMissingInstances",
    "getQuotaLimits",
    "labelReady",
    "notifyNodescanFailure",
    "getConsoleLog",
)


@pytest.mark.spec("issue 11, 2: errors at every call of a driver concern its provider alone")
@pytest.mark.parametrize("error", ERRORS)
def test_error_of_a_driver_affects_only_its_provider(
    bench: LauncherBench, quick: None, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    search = Search(
        bench,
        config(
            provider("fake-provider"),
            provider("fake-bad", labels=["bad-label"]),
            labels={"bad-label": {"min-ready": 1}},
        ),
    )
    adapter = bench.adapter("fake-bad")
    called: set[str] = set()
    for call in (*ASKED, *MORE):
        # Its node is to be deleted meanwhile.
        request_id, (node,) = bench.fulfilled("bad-label")
        bench.zuul.accept(request_id)

        def fail(*_args: Any, _call: str = call, **_options: Any) -> Any:
            called.add(_call)
            raise ERRORS[error]()

        with monkeypatch.context() as patch:
            patch.setattr(adapter, call, fail)
            waiting = bench.submit("bad-label", "bad-label")
            bench.zuul.give_back(node.id)
            if call in ASKED:
                wait_for(lambda c=call: c in called, what=f"{call} is called")
            search.served()
            search.alive()
        bench.zuul.cancel(waiting)
        bench.wait_gone(node.id)  # it heals
    assert called >= set(ASKED)
