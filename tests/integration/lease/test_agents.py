"""``nodepool mcp`` with the SDK's own client, a launcher, and a host that a real sshd serves."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

from nodepool.client import Pool
from tests import REPOSITORY
from tests.conftest import wait_for

EXPECTED = {"lease", "run", "read_file", "write_file", "renew", "return", "why"}


async def session(pool: Pool, environment: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "nodepool.cmd.nodepoolcmd", "mcp"],
        env={**os.environ, **environment},
    )
    async with Client(server) as client:

        async def call(name: str, **arguments: Any) -> Any:
            result = await client.call_tool(name, arguments)
            text = "".join(part.text for part in result.content if part.type == "text")
            return (text, True) if result.is_error else result.structured_content or text

        found["tools"] = {tool.name for tool in (await client.list_tools()).tools}
        lease = await call("lease", labels=["small"], wait="60s")
        found["lease"] = lease
        name = lease["lease"]
        found["run"] = await call("run", lease=name, command="echo out; echo err >&2; exit 3")
        found["slow"] = await call("run", lease=name, command="sleep 60", timeout="1s")
        path = f"/tmp/nodepool-agents-{os.getpid()}/a b"
        found["write"] = await call("write_file", lease=name, path=path, text="héllo\n")
        found["read"] = await call("read_file", lease=name, path=path)
        await call(
            "write_file", lease=name, path=f"~/nodepool-agents-{os.getpid()}/a", text="found"
        )
        at_home = f"cd; cat nodepool-agents-{os.getpid()}/a; rm -r nodepool-agents-{os.getpid()}"
        found["home"] = await call("run", lease=name, command=at_home)
        found["missing"] = await call("read_file", lease=name, path="/nowhere")
        found["unknown"] = await call("run", lease="200-0000000099", command="true")
        found["label"] = await call("lease", labels=["no-such-label"])
        found["renewed"] = await call("renew", lease=name, time="1h")
        found["why"] = await call("why")
        found["held"] = [one.id for one in pool.leases(state="held")]
        await call("run", lease=name, command=f"rm -r /tmp/nodepool-agents-{os.getpid()}")
        second = await call("lease", labels=["small"], wait="60s")
        found["returned"] = await call("return", lease=second["lease"])
    return found


def test_agent_leases_machines_and_works_on_them(pool: Pool) -> None:
    environment = {
        "NODEPOOL_URL": pool.url,
        "NODEPOOL_TOKEN": pool.token or "",
        "NODEPOOL_SSH_KEY": pool.key_file or "",
        "PYTHONPATH": str(REPOSITORY),
    }
    found = asyncio.run(asyncio.wait_for(session(pool, environment), 120))
    assert found["tools"] == EXPECTED
    assert (
        found["lease"]["state"] == "held"
        and found["lease"]["machines"][0]["address"] == "127.0.0.1"
    )
    assert found["run"] == {"status": 3, "stdout": "out\n", "stderr": "err\n"}
    assert found["slow"][1] and "not ended within 1 s" in found["slow"][0]
    assert "wrote 7 bytes" in str(found["write"]) and "héllo" in str(found["read"])
    assert found["home"]["stdout"] == "found"
    for failure, text in (
        ("missing", "No such file"),
        ("unknown", "has no lease 200-0000000099"),
        ("label", "no-such-label"),
    ):
        assert found[failure][1] and text in found[failure][0], failure
    assert found["why"] == {"waiting": []}
    assert found["held"] == [found["lease"]["lease"]]
    assert "is returned" in str(found["returned"])
    wait_for(lambda: pool.leases() == [], what="the leases returned at the end of the session")


class Session:
    """A session with the server, in the words of the protocol.

    :param hangup: how the server begins with SIGHUP; the tests may run below nohup.
    """

    def __init__(self, pool: Pool, hangup: signal.Handlers = signal.SIG_DFL) -> None:
        environment = {
            **os.environ,
            "NODEPOOL_URL": pool.url,
            "NODEPOOL_TOKEN": pool.token or "",
            "NODEPOOL_SSH_KEY": pool.key_file or "",
            "PYTHONPATH": str(REPOSITORY),
        }
        before = signal.signal(signal.SIGHUP, hangup)
        self.server = subprocess.Popen(
            [sys.executable, "-m", "nodepool.cmd.nodepoolcmd", "mcp"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        signal.signal(signal.SIGHUP, before)

    def __enter__(self) -> Session:
        client = {"name": "test", "version": "1"}
        hello = {"protocolVersion": "2025-03-26", "capabilities": {}, "clientInfo": client}
        self.send("initialize", hello, id=1)
        self.answer()
        self.send("notifications/initialized", {})
        return self

    def __exit__(self, *_error: object) -> None:
        self.server.kill()
        with self.server:
            pass

    def send(self, method: str, params: dict[str, Any], **fields: int) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params, **fields}
        print(json.dumps(message), file=self.server.stdin, flush=True)

    def call(self, number: int, name: str, **arguments: Any) -> None:
        self.send("tools/call", {"name": name, "arguments": arguments}, id=number)

    def answer(self) -> dict[str, Any]:
        assert self.server.stdout is not None
        found: dict[str, Any] = json.loads(self.server.stdout.readline())
        return found


@pytest.mark.parametrize("end", [None, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("busy", ["lease", "run"])
def test_end_of_the_session_returns_all_machines_while_a_call_runs(
    pool: Pool, end: signal.Signals | None, busy: str
) -> None:
    with Session(pool) as session:
        session.call(2, "lease", labels=["small"], wait="60s")
        lease = session.answer()["result"]["structuredContent"]["lease"]
        if busy == "lease":
            session.call(3, "lease", labels=["small", "small"])
            wait_for(lambda: len(pool.leases()) == 2, what="the lease that waits")
        else:
            session.call(3, "run", lease=lease, command="sleep 600")
        if end is None:
            assert session.server.stdin is not None
            session.server.stdin.close()
        else:
            session.server.send_signal(end)
        assert session.server.wait(30) == (0 if end is None else -end)
        wait_for(lambda: pool.leases() == [], what="all leases returned")


def test_lost_terminal_does_not_end_a_session_below_nohup(pool: Pool) -> None:
    with Session(pool, signal.SIG_IGN) as session:
        session.call(2, "lease", labels=["small"], wait="60s")
        lease = session.answer()["result"]["structuredContent"]["lease"]
        session.server.send_signal(signal.SIGHUP)
        session.call(3, "return", lease=lease)
        assert session.answer()["id"] == 3
    assert pool.leases() == []


def test_canceled_call_keeps_no_lease(pool: Pool) -> None:
    with Session(pool) as session:
        session.call(2, "lease", labels=["small"], wait="60s")
        lease = session.answer()["result"]["structuredContent"]["lease"]
        session.call(3, "lease", labels=["small", "small"])
        wait_for(lambda: len(pool.leases()) == 2, what="the lease that waits")
        session.send("notifications/cancelled", {"requestId": 3})
        wait_for(lambda: len(pool.leases()) == 1, what="the lease of the canceled call returned")
        assert [each.id for each in pool.leases()] == [lease]


def test_agents_need_nothing_of_nodepool_but_the_client() -> None:
    tree = ast.parse((REPOSITORY / "nodepool" / "adapters" / "mcp.py").read_text())
    modules = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in modules if name.startswith("nodepool")} == {"nodepool.client"}
