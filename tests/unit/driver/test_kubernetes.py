"""Configurations of containers, and clients that tests of others put in the place of ours."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import yaml

from nodepool.cloud.http import NoAnswer
from nodepool.cmd.config_validator import ConfigValidator
from nodepool.config import loadConfig
from nodepool.driver.kubernetes import bodies, trouble
from nodepool.driver.kubernetes.api.errors import ApiError, classify
from nodepool.exceptions import ConfigError
from tests import REPOSITORY


def load(
    tmp_path: pathlib.Path,
    driver: str,
    label: dict[str, Any],
    pool: dict[str, Any] | None = None,
    **provider: Any,
) -> Any:
    path = tmp_path / "nodepool.yaml"
    options = {"context": "c", **provider} if driver != "kubernetes" else provider
    pools = [{"name": "main", "labels": [{"name": "one", **label}], **(pool or {})}]
    path.write_text(
        yaml.safe_dump(
            {
                "labels": [{"name": label.get("name", "one")}],
                "providers": [{"name": "p", "driver": driver, "pools": pools, **options}],
            }
        )
    )
    assert ConfigValidator(str(path)).validate() in (0, 1)
    config = loadConfig(str(path))
    return config.providers["p"]


@pytest.mark.spec("KUB-13.17, OSH-12.12")
def test_sample_configuration_is_valid() -> None:
    config = loadConfig(str(REPOSITORY / "etc" / "kubernetes.yaml"))
    assert ConfigValidator(str(REPOSITORY / "etc" / "kubernetes.yaml")).validate() == 0
    assert {name: provider.driver.name for name, provider in config.providers.items()} == {
        "cluster": "kubernetes",
        "openshift": "openshift",
        "openshift-shared": "openshiftpods",
    }


@pytest.mark.spec("KUB-13.17")
def test_spec_and_other_options(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "nodepool.yaml"
    label = {"name": "one", "type": "pod", "spec": {}, "cpu": 2}
    pools = [{"name": "main", "labels": [label]}]
    text = {
        "labels": [{"name": "one"}],
        "providers": [{"name": "p", "driver": "kubernetes", "pools": pools}],
    }
    path.write_text(yaml.safe_dump(text))
    assert ConfigValidator(str(path)).validate() == 1


@pytest.mark.spec("KUB-4, OSH-4")
def test_limits_of_pools(tmp_path: pathlib.Path) -> None:
    limits = {
        "max-servers": 5,
        "max-cores": 6,
        "max-ram": 7,
        "max-resources": {"gpu": 1, "disk": 2},
    }
    provider = load(
        tmp_path,
        "kubernetes",
        {"type": "pod"},
        {"max-resources": {"disk": 3, "cores": 4}},
        **limits,
    )
    pool = provider.pools["main"]
    assert (pool.max_servers, pool.max_cores, pool.max_ram) == (5, 4, 7)
    assert pool.max_resources == {"gpu": 1, "disk": 3, "cores": 4}
    assert (
        load(tmp_path, "kubernetes", {"type": "pod"}, **{"launch-retries": 0}).launch_retries == 1
    )
    assert (
        load(tmp_path, "openshift", {"type": "pod"}, **{"max-servers": 9, "max-projects": 4})
        .pools["main"]
        .max_servers
        == 4
    )
    assert (
        load(tmp_path, "openshiftpods", {"image": "i"}, **{"max-pods": 3, "max-servers": 9})
        .pools["main"]
        .max_servers
        == 3
    )


@pytest.mark.spec("KUB-4, KUB-9")
@pytest.mark.parametrize("name", ["default-label-extra-resources", "default-label-extra_resources"])
def test_extra_resources_of_label_and_pool_are_merged(tmp_path: pathlib.Path, name: str) -> None:
    label = {"type": "pod", "gpu": 1, "gpu-resource": "g", "extra-resources": {"b": 3, "cores": 9}}
    provider = load(
        tmp_path,
        "kubernetes",
        label,
        {name: {"a": 1, "b": 2}, "default-label-cpu": 2, "default-label-storage": 0},
    )
    found = bodies.quota(provider.pools["main"].labels["one"]).get_resources()
    assert found == {"cores": 9, "ram": 0, "instances": 1, "g": 1, "a": 1, "b": 3}


@pytest.mark.spec("KUB-4")
@pytest.mark.parametrize(
    ("driver", "label", "pool", "told"),
    [
        ("kubernetes", {"type": "pod"}, {"name": "under_score"}, "lower-case letters"),
        ("kubernetes", {"type": "pod"}, {"name": "x" * 60}, "too long"),
        ("kubernetes", {"type": "pod", "name": "Upper"}, {}, "lower-case letters"),
        ("kubernetes", {"type": "pod", "labels": {"a": "x" * 64}}, {}, "at most 63"),
        (
            "kubernetes",
            {"type": "pod", "dynamic-labels": {"bad key": "x"}},
            {},
            "cannot be the name of a Kubernetes label",
        ),
        ("kubernetes", {"type": "pod", "gpu": 1}, {}, "gpu-resource are needed together"),
        ("openshiftpods", {}, {}, "needs an image"),
        ("openshift", {"type": "pod", "context": None}, {}, "context"),
    ],
)
def test_what_is_refused(
    tmp_path: pathlib.Path, driver: str, label: dict[str, Any], pool: dict[str, Any], told: str
) -> None:
    more = {"context": label.pop("context")} if "context" in label else {}
    with pytest.raises(ConfigError, match=told):
        load(tmp_path, driver, label, pool, **more)


@pytest.mark.spec("KUB-7")
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NoAnswer("x"), "transient"),
        (ApiError("x", 500), "transient"),
        (ApiError("x", 429), "throttled"),
        (ApiError("x", 404), "not_found"),
        (ApiError("x", 403, message="no"), "configuration"),
        (ApiError("x", 403, message="Exceeded quota: a"), "quota"),
        (ApiError("x", 409, "AlreadyExists"), "other"),
        (ApiError("x", 409, "Conflict"), "transient"),
        (ApiError("x", 422), "configuration"),
        (ValueError("x"), "other"),
    ],
)
def test_kinds_of_errors(error: Exception, kind: str) -> None:
    assert classify(error).value == kind


def _pod(phase: str, policy: str = "Always", **statuses: dict[str, Any]) -> dict[str, Any]:
    """A pod with at most one container of each type; the keywords are the status of each."""
    found = {f"{kind}Statuses": [{"name": "c", **status}] for kind, status in statuses.items()}
    return {"spec": {"restartPolicy": policy}, "status": {"phase": phase, **found}}


KILLED = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
DONE = {"terminated": {"reason": "Completed", "exitCode": 0}}
BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
RUNS: dict[str, Any] = {"running": {}}


@pytest.mark.spec("KUB-7: the reason of a waiting pod includes how its container ended")
@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (
            _pod("Running", container={"state": BACK_OFF, "lastState": KILLED}),
            "container c: CrashLoopBackOff: back-off 10s: OOMKilled: exit code 137",
        ),
        (_pod("Running", container={"state": KILLED}), "container c: OOMKilled: exit code 137"),
        (_pod("Running", container={"state": DONE}), "container c: Completed: exit code 0"),
        (_pod("Running", "OnFailure", container={"state": KILLED}), "c: OOMKilled: exit code 137"),
        (_pod("Running", "OnFailure", container={"state": DONE}), None),
        (_pod("Running", "Never", container={"state": KILLED}), None),
        (_pod("Running", container={"state": RUNS, "lastState": KILLED}), None),
        (_pod("Pending", initContainer={"state": KILLED}), "c: OOMKilled: exit code 137"),
        (
            _pod("Pending", initContainer={"state": RUNS, "lastState": KILLED}),
            "container c: OOMKilled: exit code 137",
        ),
        (_pod("Pending", initContainer={"state": DONE, "lastState": KILLED}), None),
        # A sidecar among the init containers that has been restarted.
        (_pod("Running", initContainer={"state": RUNS, "lastState": KILLED}), None),
    ],
)
def test_waiting_pod_names_how_its_container_ended(pod: dict[str, Any], reason: str | None) -> None:
    told = trouble.waits(pod)
    assert told is None if reason is None else told is not None and told.endswith(reason)
    assert reason is None or not trouble.is_running(pod)


def _conditions(*ready: tuple[str, str | None], containers: str = "True") -> dict[str, Any]:
    found = [{"type": "ContainersReady", "status": containers}]
    found += [{"type": "Ready", "status": status, "reason": reason} for status, reason in ready]
    return {"spec": {"nodeName": "m"}, "status": {"phase": "Running", "conditions": found}}


@pytest.mark.spec("KUB-10: [extra] a ready node whose machine the cluster misses")
@pytest.mark.parametrize(
    ("pod", "running"),
    [
        (_conditions(), True),
        (_conditions(("True", None)), True),
        (_conditions(("False", None)), False),
        (_conditions(("False", "ReadinessGatesNotReady")), True),
        (_conditions(("False", None), containers="False"), True),
        (_conditions(("False", "ContainersNotReady"), containers="False"), True),
    ],
)
def test_pod_of_a_stopped_machine_does_not_run(pod: dict[str, Any], running: bool) -> None:
    assert trouble.is_running(pod) == running
    assert trouble.waits(pod) == (None if running else "machine m has stopped reporting")


@pytest.mark.spec("KUB-7: a failed pod names the init container that failed")
def test_failed_pod_names_its_failed_init_container() -> None:
    pod = _pod("Failed", "Never", initContainer={"state": KILLED})
    assert "container c: OOMKilled: exit code 137" in str(trouble.failed(pod))


@pytest.mark.spec("KUB-7: [extra] the latest warning about a pod")
def test_latest_warning_among_events_is_returned() -> None:
    events = [
        {"type": "Normal", "reason": "Scheduled", "lastTimestamp": "2026-01-01T00:00:09Z"},
        {"type": "Warning", "reason": "FailedMount", "message": "no v", "lastTimestamp": "2026-01"},
        {"type": "Warning", "reason": "Old", "lastTimestamp": None},
    ]
    assert trouble.warning(events) == "FailedMount: no v"
    assert trouble.warning([]) is None


@pytest.mark.spec("KUB-7")
def test_why_a_pod_waits() -> None:
    waiting = {
        "name": "c",
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
    }
    looping = {"status": {"phase": "Running", "containerStatuses": [waiting]}}
    assert trouble.waits(looping) == "container c: CrashLoopBackOff: back-off"
    assert not trouble.is_running(looping) and trouble.failed(looping) is None
    creating = {
        "status": {
            "phase": "Pending",
            "containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}],
        }
    }
    assert trouble.waits(creating) is None and not trouble.is_running(creating)
    assert trouble.is_running({"status": {"phase": "Running"}})
    deleted = {"metadata": {"deletionTimestamp": "now"}, "status": {"phase": "Running"}}
    assert not trouble.is_running(deleted)
    # Whatever a server says, it is not an error of ours.
    for odd in (
        {},
        {"status": None},
        {"status": {"phase": "Pending", "initContainerStatuses": [{"lastState": 3}]}},
        {"status": {"conditions": "x", "containerStatuses": [None, {"state": 3}]}},
    ):
        assert trouble.waits(odd) is None and trouble.failed(odd) is None
