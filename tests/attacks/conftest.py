"""A node manager with a sliver that attacks and one that is attacked."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.attacks.library import ATTEMPTS
from tests.support.nodemanager.scene import NmDaemon, run_daemon

HERE = pathlib.Path(__file__).parent
ATTACKER, VICTIM = "mallory", "victim"


#: Imports of modules that are parts of the program, on one line or several.
OWN_IMPORT = re.compile(r"^from (?:__future__|tests\.)\S* import (?:\([^)]*\)|.*)\n", re.MULTILINE)


def program(*modules: str, tail: str = "run_all()") -> str:
    """The text of a program that makes all attempts of these modules."""
    parts = [
        (HERE / "library.py").read_text(),
        *((HERE / "attempts" / f"{module}.py").read_text() for module in modules),
    ]
    texts = [OWN_IMPORT.sub("", part) for part in parts]
    return "\n".join(["from __future__ import annotations", *texts, tail, ""])


def attempts_of(module: str, privileged: bool = False) -> dict[str, tuple[str, frozenset[str]]]:
    """Name -> what it tries, and which outcomes are all right."""
    ATTEMPTS.clear()
    importlib.reload(importlib.import_module(f"tests.attacks.attempts.{module}"))
    return {
        name: (what, frozenset(may) | (frozenset(more) if privileged else frozenset()))
        for name, (what, _function, may, more) in ATTEMPTS.items()
    }


def results(text: str) -> dict[str, dict[str, Any]]:
    return {
        line["attempt"]: line
        for line in (json.loads(each) for each in text.splitlines() if each.startswith("{"))
    }


def judge(module: str, found: dict[str, dict[str, Any]], privileged: bool = False) -> list[str]:
    """What is wrong, in words."""
    wrong = []
    for name, (what, may) in attempts_of(module, privileged).items():
        result = found.get(name, {"error": "it did not end"})
        if result.get("outcome") not in may:
            wrong.append(
                f"{name} ({what}): "
                f"{result.get('escape') or result.get('outcome') or result.get('error')}"
            )
    return wrong


def attack(
    daemon: NmDaemon,
    name: str,
    *modules: str,
    user: str = "root",
    timeout: float = 90,
    tail: str = "run_all()",
) -> dict[str, dict[str, Any]]:
    """Run the attempts in a sliver, over SSH."""
    found = daemon.client.call("GetRecord", name)
    done = subprocess.run(
        [
            "ssh",
            "-i",
            str(daemon.key),
            "-p",
            str(found["ssh_port"]),
            "-o",
            "BatchMode=yes",
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            f"UserKnownHostsFile={os.devnull}",
            "-o",
            "LogLevel=ERROR",
            f"{user}@{found['ssh_address']}",
            "exec python3 -I -",
        ],
        input=program(*modules, tail=tail),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    return results(done.stdout)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NmDaemon]:
    if os.geteuid() != 0:
        pytest.skip("native slivers need root")
    for daemon in run_daemon(NmDaemon(tmp_path_factory.mktemp("host"), number=5)):
        for name in (ATTACKER, VICTIM):
            daemon.put(
                name, rspec={"nm_mem_limit": 256, "nm_pids_max": 300, "nm_disk_quota": 102400}
            )
        yield daemon
