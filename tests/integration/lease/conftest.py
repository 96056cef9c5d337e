"""A launcher with the API of leases."""

from __future__ import annotations

import contextlib
import http.client
import json
import pathlib
import socket
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest
from kazoo.exceptions import NoNodeError

from nodepool.access.identity import Role
from nodepool.access.tokens import Tokens
from nodepool.client import Pool
from nodepool.web.actions.actions import Actions
from nodepool.web.server import WebApp
from tests.support.launcher import LauncherBench, config, provider
from tests.support.sshd import SSHServer, ssh_server


class Answer(NamedTuple):
    status: int
    content: Any
    headers: Mapping[str, str]


class Api:
    """The API of one launcher, and tokens for it."""

    def __init__(self, bench: LauncherBench, launcher: Any, directory: pathlib.Path) -> None:
        self.bench, self.launcher = bench, launcher
        self.socket = str(directory / "api.sock")
        self.actions = Actions(launcher, "loopback")
        self.app = WebApp(
            launcher, port=0, listen_address="127.0.0.1", actions=self.actions, unix=self.socket
        )
        self.port = int(self.app.server.socket.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.app.start()
        # Tests use parts of the server that begin with its loop.
        self.call("GET", "/")

    def token(self, name: str = "alice", role: Role = Role.BORROW, **limits: Any) -> str:
        return Tokens(lambda: self.bench.zk).create(name, role, **limits)[1]

    def pool(self, name: str = "alice", role: Role = Role.BORROW, **limits: Any) -> Pool:
        return Pool(self.url, self.token(name, role, **limits))

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        unix: bool = False,
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=90)
        if unix:
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(90)
            connection.sock.connect(self.socket)
        sent = {"Content-Type": "application/json", **(headers or {})}
        if token is not None:
            sent["Authorization"] = f"Bearer {token}"
        data = (
            body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        )
        connection.request(method, f"/api/v1{path}", data, sent)
        answer = connection.getresponse()
        found = answer.read()
        connection.close()
        content = (
            json.loads(found)
            if found and "json" in answer.headers.get_content_type()
            else found.decode()
        )
        return Answer(answer.status, content, dict(answer.headers))


@pytest.fixture
def api(bench: LauncherBench, tmp_path: pathlib.Path) -> Iterator[Api]:
    """One launcher with four nodes of the label ``fake-label`` and of ``other``."""
    bench.quota(instances=4)
    settings = config(
        provider(labels=["fake-label", "other", "zuul-only"]),
        labels={"zuul-only": {"lease": False}},
    )
    served = Api(bench, bench.start(settings), tmp_path)
    try:
        yield served
    finally:
        served.app.stop()


@pytest.fixture(scope="module")
def sshd() -> Iterator[SSHServer]:
    with ssh_server(kinds=["ed25519"], options=["Subsystem sftp internal-sftp"]) as server:
        yield server


@contextlib.contextmanager
def places(
    bench: LauncherBench,
    sshd: SSHServer,
    directory: pathlib.Path,
    number: int = 2,
    label: str = "small",
    *others: str,
    names: tuple[str, ...] = ("127.0.0.1",),
    **limits: Any,
) -> Iterator[Pool]:
    """A pool with nodes on one host, which may have several names, and labels that it does not
    offer.

    :param limits: of the token.
    """
    host = {
        "labels": [label],
        "username": "root",
        "connection-port": sshd.port,
        "max-parallel-jobs": number,
        "host-key-checking": True,
    }
    nodes = [{"name": name, **host} for name in names]
    entry = {"name": "hosts", "driver": "static", "pools": [{"name": "main", "nodes": nodes}]}
    labels = [{"name": name} for name in (label, *others)]
    api = Api(bench, bench.start({"labels": labels, "providers": [entry]}), directory)
    try:
        yield Pool(api.url, api.token(**limits), str(sshd.client_key))
    finally:
        api.app.stop()


@pytest.fixture
def pool(bench: LauncherBench, sshd: SSHServer, tmp_path: pathlib.Path) -> Iterator[Pool]:
    with places(bench, sshd, tmp_path) as made:
        yield made


def ephemerals(bench: LauncherBench, session: int, path: str = "/nodepool") -> list[str]:
    """Return the paths of the znodes that end with a session."""
    client = bench.zuul.client
    found = []
    try:
        names = client.get_children(path)
    except NoNodeError:  # deleted since its parent was listed
        return []
    for name in names:
        below = f"{path}/{name}"
        stat = client.exists(below)
        if stat is not None and stat.ephemeralOwner == session:
            found.append(below)
        elif stat is not None:
            found += ephemerals(bench, session, below)
    return found
