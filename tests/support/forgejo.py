"""Answers like Forgejo 15 for the calls that the daemon makes, by its documented schemas; and plays
``forgejo-runner one-job``.

Forgejo itself cannot be built here: its modules are not public. The calls of the runner are made
up: its protocol is not what is tested.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

from tests.support.fault_proxy import FaultProxy, Forward, Reply, Request

RUNNERS = "/api/v1/admin/actions/runners"


class LookAlike:
    """Has jobs, and runners that were made for them.

    :ivar ran: handle and name of the runner of each job that was started, in order.
    """

    def __init__(self) -> None:
        self.server = SimpleNamespace(token="0123456789abcdef")
        self.jobs: dict[str, dict[str, Any]] = {}
        self.made: dict[int, dict[str, Any]] = {}
        self.ran: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self.proxy = FaultProxy(("127.0.0.1", 9), look_alike=self._answer)
        self.url = self.proxy.url

    def add(self, *names: str, label: str) -> None:
        with self._lock:
            for name in names:
                handle, number = f"handle-{name}", len(self.jobs) + 1
                self.jobs[handle] = {
                    "id": number,
                    "name": name,
                    "runs_on": [label],
                    "status": "waiting",
                    "handle": handle,
                }

    def cancel(self, handle: str) -> Reply:
        """Cancel a job; return the answer for the runner that asks for it."""
        with self._lock:
            self.jobs[handle]["status"] = "cancelled"
        return Reply(404, b"{}")

    def runners(self) -> list[dict[str, Any]]:
        with self._lock:
            return list(self.made.values())

    def _answer(self, request: Request, _forward: Forward) -> Reply:
        path, body = request.path.partition("?")[0], json.loads(request.body or b"null")
        with self._lock:
            status, content = self._call(request.method, path, request.path.partition("?")[2], body)
        return Reply(status, json.dumps(content).encode() if status != 204 else b"")

    def _call(self, method: str, path: str, query: str, body: Any) -> tuple[int, Any]:
        number = re.fullmatch(rf"{RUNNERS}/(\d+)", path)
        if (method, path) == ("GET", f"{RUNNERS}/jobs"):
            return 200, [
                job for job in self.jobs.values() if job["status"] in ("waiting", "running")
            ] or None
        if (method, path) == ("GET", RUNNERS):
            return 200, list(self.made.values()) if "page=1&" in query else []
        if (method, path) == ("POST", RUNNERS) and body["ephemeral"] is True:
            new = len(self.ran) + 100 + len(self.made)
            self.made[new] = {
                "id": new,
                "uuid": f"u-{new}",
                "name": body["name"],
                "status": "offline",
                "ephemeral": True,
            }
            return 201, {"id": new, "uuid": f"u-{new}", "token": f"t-{new}"}
        if number is not None:
            found = self.made.get(int(number[1]))
            if found is None:
                return 404, {}
            return (204, self.made.pop(int(number[1]))) if method == "DELETE" else (200, found)
        runner = next(
            (
                each
                for each in self.made.values()
                if body and (each["uuid"], f"t-{each['id']}") == tuple(body["who"])
            ),
            None,
        )
        job = self.jobs.get(body["handle"]) if body else None
        if runner is None or job is None:
            return 404, {}
        if path == "/start" and job["status"] == "waiting":
            job["status"], runner["status"] = "running", "active"
            self.ran.append((job["handle"], runner["name"]))
            return 200, {}
        if path == "/end":
            job["status"] = "success"
            del self.made[runner["id"]]
            return 200, {}
        return 404, {}


def main() -> int:
    """Run one job, as ``forgejo-runner one-job`` does; its job lasts a second."""
    parser = argparse.ArgumentParser("forgejo-runner")
    parser.add_argument("command", choices=["one-job"])
    for name in ("url", "uuid", "token-url"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--label", action="append", required=True)
    parser.add_argument("--handle", default="")
    args = parser.parse_args()
    who = [args.uuid, pathlib.Path(args.token_url.removeprefix("file:")).read_text()]

    def call(path: str) -> bool:
        body = json.dumps({"who": who, "handle": args.handle}).encode()
        try:
            with urllib.request.urlopen(
                urllib.request.Request(args.url + path, body), timeout=10
            ) as answer:
                return bool(answer.read())
        except urllib.error.HTTPError:
            return False

    if not call("/start"):
        return 2
    time.sleep(1)
    return 0 if call("/end") else 1


if __name__ == "__main__":
    sys.exit(main())
