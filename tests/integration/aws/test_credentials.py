"""Credentials that change, come late or are wrong, against moto over HTTP: nothing needs a restart (issue, bad input)."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.support.aws.cloud import AwsCloud
from tests.support.aws.scene import adapter, failed, one, start
from tests.support.fault_proxy import Forward, Reply, Request, ec2_error
from tests.support.launcher import LauncherBench


@pytest.fixture
def keys(aws: AwsCloud, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """The credentials file. AWS accepts the key "good" only."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    refuse = ec2_error("AuthFailure", 401, "AWS was not able to validate the credentials")

    def check(request: Request, forward: Forward) -> Reply | None:
        return forward(request) if "Credential=good/" in request.headers.get("authorization", "") else refuse(request, forward)

    aws.proxy.fail(lambda _request: True, check, float("inf"))
    return path


def write(path: pathlib.Path, key: str, profile: str = "default") -> None:
    path.write_text(f"[{profile}]\naws_access_key_id = {key}\naws_secret_access_key = secret-of-{key}\n")
    path.chmod(0o600)


def test_changed_keys_are_used(bench: LauncherBench, aws: AwsCloud, keys: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    write(keys, "good")
    start(bench, aws, aws.label(), launch_retries=1)
    first = adapter(bench)
    one(bench)
    write(keys, "wrong")
    failed(bench)
    assert any("not able to validate" in line for line in bench.pools[0].getReadiness()[1])
    keys.write_text("[default")  # in the middle of being written
    failed(bench)
    assert "keeping the previous credentials" in caplog.text
    write(keys, "good")
    one(bench)
    assert adapter(bench) is first, "the provider was not restarted"
    assert "secret-of" not in caplog.text


def test_keys_that_come_late(
        bench: LauncherBench, aws: AwsCloud, keys: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr("nodepool.driver.aws.api.credentials.SEARCH_INTERVAL", 0.0)
    start(bench, aws, aws.label(), launch_retries=1)
    bench.submit("small")
    error: Any = wait_for(lambda: adapter(bench).calls.describe()["last_error"], 20, "a call without credentials")
    assert "credentials" in error["message"]
    write(keys, "good")
    one(bench)


def test_a_profile_that_comes_late(bench: LauncherBench, aws: AwsCloud, keys: pathlib.Path) -> None:
    write(keys, "good")
    pool = start(bench, aws, aws.label(), profile_name="ci")
    wait_for(lambda: "ec2-us" in pool.config.providers_not_running, 10, "the provider is left out")
    write(keys, "good", "ci")
    wait_for(lambda: "ec2-us" in pool.config.provider_managers, 20, "the provider works")
    one(bench)
