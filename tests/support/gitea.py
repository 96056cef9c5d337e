"""A real Gitea (tools/gitea) with an administrator; repositories with workflows, and what its
API reports about their jobs.
"""

from __future__ import annotations

import base64
import contextlib
import http.cookiejar
import importlib
import json
import pathlib
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests import REPOSITORY

CALL_TIMEOUT = 30.0


def server_module() -> Any:
    """Return the module of ``tools/gitea``."""
    if str(REPOSITORY / "tools") not in sys.path:
        sys.path.append(str(REPOSITORY / "tools"))
    return importlib.import_module("forge.server")


def workflow(jobs: dict[str, tuple[Sequence[str], str]]) -> str:
    """Return a workflow.

    :param jobs: labels and script of each job.
    """
    found = {
        name: {"runs-on": list(labels), "steps": [{"run": script}]}
        for name, (labels, script) in jobs.items()
    }
    return json.dumps({"on": ["push"], "jobs": found}, indent=1)  # which is YAML


class Forge:
    """A running server, called as its administrator unless a token is given."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.url: str = server.url

    def call(self, method: str, path: str, body: object = None, token: str | None = None) -> Any:
        """Return the answer of a call below ``/api/v1``.

        :raises urllib.error.HTTPError: the server refuses it.
        """
        headers = {
            "Authorization": f"token {token or self.server.token}",
            "Content-Type": "application/json",
        }
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/api/v1{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=CALL_TIMEOUT) as answer:
            found = answer.read()
        return json.loads(found) if found else None

    def repository(self, jobs: dict[str, tuple[Sequence[str], str]]) -> str:
        """Create a repository with a workflow, which runs; return ``owner/name``."""
        name = f"r{uuid.uuid4().hex[:8]}"
        self.call(
            "POST", "/user/repos", {"name": name, "auto_init": True, "default_branch": "main"}
        )
        found = f"{self.server.user}/{name}"
        self.push(found, jobs)
        return found

    def push(
        self, repository: str, jobs: dict[str, tuple[Sequence[str], str]], name: str = ""
    ) -> None:
        """Add a workflow to a repository; it runs."""
        path = f"/repos/{repository}/contents/.gitea/workflows/{name or uuid.uuid4().hex[:8]}.yaml"
        self.call(
            "POST",
            path,
            {
                "content": base64.b64encode(workflow(jobs).encode()).decode(),
                "message": "add workflow",
            },
        )

    def jobs(self, repository: str) -> dict[str, dict[str, Any]]:
        """Return the jobs of a repository by their names."""
        found, page = {}, 1
        while True:
            answer = self.call("GET", f"/repos/{repository}/actions/jobs?page={page}&limit=50")
            found |= {job["name"]: job for job in answer["jobs"]}
            if not answer["jobs"] or len(found) >= answer["total_count"]:
                return found
            page += 1

    def states(self, repository: str) -> dict[str, str]:
        """Return status or conclusion of each job."""
        return {
            name: job.get("conclusion") or job["status"]
            for name, job in self.jobs(repository).items()
        }

    def log(self, repository: str, job: int) -> str:
        request = urllib.request.Request(
            f"{self.url}/api/v1/repos/{repository}/actions/jobs/{job}/logs",
            headers={"Authorization": f"token {self.server.token}"},
        )
        with urllib.request.urlopen(request, timeout=CALL_TIMEOUT) as answer:
            return str(answer.read().decode())

    def runners(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call("GET", "/admin/actions/runners?limit=50")["runners"]
        return found

    def cancel(self, repository: str) -> None:
        """Cancel the runs of a repository, as its page does."""
        cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        opener = urllib.request.build_opener(cookies)
        form = {"user_name": self.server.user, "password": self.server.password}
        self._page(opener, "/user/login", form)
        for run in {job["run_id"] for job in self.jobs(repository).values()}:
            self._page(opener, f"/{repository}/actions/runs/{run}/cancel", {})

    def _page(self, opener: urllib.request.OpenerDirector, path: str, form: dict[str, str]) -> None:
        request = urllib.request.Request(
            self.url + path, urllib.parse.urlencode(form).encode(), {"Origin": self.url}
        )
        # Pages are not built: what counts is what the server does.
        with (
            contextlib.suppress(urllib.error.HTTPError),
            opener.open(request, timeout=CALL_TIMEOUT) as answer,
        ):
            answer.read()


@contextlib.contextmanager
def running() -> Iterator[Forge]:
    """Run a server with an empty database; skips the test if it was not built."""
    module = server_module()
    if not module.is_installed():
        pytest.skip("Gitea is not built: run tools/gitea install")
    with tempfile.TemporaryDirectory(prefix="nodepool-gitea-") as directory:
        server = module.Gitea(pathlib.Path(directory))
        try:
            server.up()
            yield Forge(server)
        finally:
            server.down()
