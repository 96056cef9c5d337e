"""The API keeps to its OpenAPI document, whatever is sent: schemathesis generates the calls."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import pytest

from nodepool.access.identity import Role
from tests.integration.lease.conftest import Api

#: What is checked of each answer. Answers to invalid bodies may be 404, 409 or 410: the object is
#: looked up first.
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_"
    "conformance"
)


@pytest.mark.parametrize("role", [Role.BORROW, Role.ADMIN])
def test_every_answer_is_as_described(api: Api, tmp_path: pathlib.Path, role: Role) -> None:
    document = api.call("GET", "/openapi.json").content
    # Names that exist, so that most calls get beyond the check of their parameters.
    lease = api.call(
        "POST", "/leases", {"labels": ["fake-label"], "wait": 30}, api.token("alice", role)
    ).content
    document["components"]["schemas"]["NewLease"]["properties"]["labels"]["items"] = {
        "enum": ["fake-label"]
    }
    document["components"]["schemas"]["NewLease"]["properties"]["wait"]["maximum"] = 0.2
    names = {
        "wait": ["0", "0.1"],
        "state": ["held", "waiting"],
        "format": ["config", "known_hosts"],
        "directory": ["/tmp"],
    }
    for path, item in document["paths"].items():
        for operation in item.values():
            for parameter in operation["parameters"]:
                known = (
                    [lease["id"]]
                    if "leases" in path and parameter["name"] == "id"
                    else names.get(parameter["name"])
                )
                if known:
                    parameter["schema"] = {"enum": known}
    description = tmp_path / "openapi.json"
    description.write_text(json.dumps(document))
    (tmp_path / "schemathesis.toml").write_text(
        f'headers = {{ Authorization = "Bearer {api.token("alice", role)}" }}\n'
    )
    argv = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "--config-file",
        str(tmp_path / "schemathesis.toml"),
        "run",
        str(description),
        "--url",
        api.url,
        "--checks",
        CHECKS,
        "--max-examples",
        "25",
        "--seed",
        "1",
        "--request-timeout",
        "30",
        "--suppress-health-check",
        "all",
        "--no-color",
    ]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, (
        re.sub(r"(.{300}).{400,}", r"\1…", done.stdout)[-6000:] + done.stderr[-2000:]
    )
