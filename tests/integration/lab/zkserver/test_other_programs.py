"""Zuul's own client, and the launcher of release 11.0.0, on the embedded server: black boxes in
a virtual environment.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml

from tests.conftest import wait_for
from tests.support.embedded import Server
from tests.support.others import SERVE, configuration, running

HERE = pathlib.Path(__file__).resolve().parent


@pytest.fixture
def server(tmp_path: pathlib.Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.kill()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("launcher", ["11.0.0", "ours"])
def test_build_of_zuul_survives_a_restart_of_the_server(
    launcher: str, others: str, server: Server, tmp_path: pathlib.Path
) -> None:
    files = server.client_files()
    config = {
        "zookeeper-servers": [{"host": "127.0.0.1", "port": server.port}],
        "zookeeper-tls": files,
        **configuration(),
    }
    path = tmp_path / "nodepool.yaml"
    path.write_text(yaml.safe_dump(config))
    python = others if launcher == "11.0.0" else sys.executable
    serve = [python, SERVE, str(path)]
    zuul = [
        others,
        str(HERE / "zuul_client.py"),
        f"127.0.0.1:{server.port}",
        files["cert"],
        files["key"],
        files["ca"],
    ]
    logs = tmp_path / "launcher.log", tmp_path / "zuul.log"
    with (
        running(serve, logs[0]),
        running(zuul, logs[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as build,
    ):
        assert build.stdin is not None and build.stdout is not None
        step = build.stdout.readline().split()
        assert step and step[0] == "in-use", logs[1].read_text()
        server.kill()
        server.start()
        build.stdin.write("go on\n")
        build.stdin.flush()
        assert build.stdout.readline() == "deleted\n", (
            logs[1].read_text() + logs[0].read_text()[-5000:]
        )
        build.stdin.write("go on\n")
        build.stdin.flush()
        wait_for(lambda: build.poll() is not None, what="end of the client", timeout=60)
        assert build.returncode == 0, logs[1].read_text()
        assert "thread failed" not in logs[1].read_text()
