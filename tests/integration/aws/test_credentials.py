"""Credentials that change, come late or are wrong, against moto over HTTP: nothing needs a
restart (issue, bad input).
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from nodepool.driver.aws.adapter import AwsAdapter
from tests.conftest import wait_for
from tests.support.aws.cloud import AwsCloud
from tests.support.aws.scene import adapter, failed, one, start
from tests.support.fault_proxy import Forward, Reply, Request, ec2_error
from tests.support.launcher import LauncherBench


class Keys:
    """The file of credentials, and which key AWS accepts."""

    def __init__(self, path: pathlib.Path, accepted: str) -> None:
        self.path, self.accepted = path, accepted

    def write(self, key: str, profile: str = "default") -> None:
        self.path.write_text(
            f"[{profile}]\naws_access_key_id = {key}\naws_secret_access_key = secret-of-{key}\n"
        )
        self.path.chmod(0o600)


@pytest.fixture
def keys(aws: AwsCloud, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Keys:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    keys = Keys(tmp_path / "credentials", "good")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys.path))
    monkeypatch.setattr(AwsAdapter, "CREDENTIALS_INTERVAL", 0.0)
    refuse = ec2_error("AuthFailure", 401, "AWS was not able to validate the credentials")

    def check(request: Request, forward: Forward) -> Reply | None:
        known = f"Credential={keys.accepted}/" in request.headers.get("authorization", "")
        return forward(request) if known else refuse(request, forward)

    aws.proxy.fail(lambda _request: True, check, float("inf"))
    return keys


def recovers(bench: LauncherBench) -> None:
    """Wait until a request is fulfilled; the first one after a change may fail."""

    def state(request_id: str) -> Any:
        return wait_for(
            lambda: {"fulfilled", "failed"} & {bench.zuul.request(request_id)["state"]},
            20,
            "an end",
        )

    assert {"fulfilled"} in (state(bench.submit("small")), state(bench.submit("small")))


def test_refused_keys_are_read_again_without_a_restart(
    bench: LauncherBench, aws: AwsCloud, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    keys.write("good")
    start(bench, aws, aws.label(), launch_retries=1)
    first = adapter(bench)
    one(bench)
    keys.accepted = "rotated"
    failed(bench)
    assert any("not able to validate" in line for line in bench.pools[0].getReadiness()[1])
    keys.path.write_text("[default")  # in the middle of being written
    failed(bench)
    assert "keeping the previous ones" in caplog.text
    keys.write("rotated")
    recovers(bench)
    assert adapter(bench) is first, "the provider was not restarted"
    assert "secret-of" not in caplog.text


def test_refused_keys_are_read_once_per_interval(
    bench: LauncherBench, aws: AwsCloud, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.write("good")
    start(bench, aws, aws.label(), launch_retries=1)
    monkeypatch.setattr(AwsAdapter, "CREDENTIALS_INTERVAL", 3600.0)
    keys.accepted = "rotated"
    keys.write("rotated")
    failed(bench)
    failed(bench)


def test_keys_that_come_late(bench: LauncherBench, aws: AwsCloud, keys: Keys) -> None:
    start(bench, aws, aws.label(), launch_retries=1)
    bench.submit("small")
    error: Any = wait_for(
        lambda: adapter(bench).calls.describe()["last_error"], 20, "a call without credentials"
    )
    assert "credentials" in error["message"]
    keys.write("good")
    recovers(bench)


def test_a_profile_that_comes_late(bench: LauncherBench, aws: AwsCloud, keys: Keys) -> None:
    keys.write("good")
    pool = start(bench, aws, aws.label(), profile_name="ci")
    wait_for(lambda: "ec2-us" in pool.config.providers_not_running, 10, "the provider is left out")
    keys.write("good", "ci")
    wait_for(lambda: "ec2-us" in pool.config.provider_managers, 20, "the provider works")
    one(bench)
