"""Reasons to wait: values with one renderer (nodepool.reasons)."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.launcher.launcher import NodePool
from nodepool.reasons import Code, Declined, Reason, because, render
from tests import REPOSITORY

MANUAL = REPOSITORY / "doc/operation/waiting.rst"


def example(code: Code) -> dict[str, str]:
    return {name: f"<{name}>" for name in re.findall(r"\{(\w+)\}", code.value)}


@pytest.mark.parametrize("code", Code)
def test_each_is_put_into_words_and_is_in_the_manual(code: Code) -> None:
    text = str(because(code, **example(code)).at("cloud-main"))
    assert text.startswith("cloud-main: ") and "{" not in text
    if code in (Code.PROVIDER_QUOTA, Code.POOL_LIMIT):  # their figures are
        return
    fixed = max(re.split(r"\{\w+\}", code.value), key=len)
    assert " ".join(fixed.strip(" :,;").split()[:4]).strip(",;:") in MANUAL.read_text()


def test_reason_matches_its_code_and_parameters() -> None:
    reason = because(Code.TENANT_LIMIT, tenant="t", limit=3, resource="cores", used=3, needed=1)
    assert reason.includes(because(Code.TENANT_LIMIT)) and reason.at("p").includes(
        because(Code.TENANT_LIMIT, tenant="t")
    )
    assert not reason.includes(because(Code.TENANT_LIMIT, tenant="u")) and not reason.includes(
        because(Code.BUSY)
    )
    assert render([reason.at("p-main"), because(Code.OTHER_LAUNCHER)]) == (
        "p-main: tenant t is limited to 3 cores, 3 in use, 1 needed; another launcher can serve it"
    )


@pytest.mark.parametrize(
    ("limit", "end"), [(0, "in `tenant-resource-limits`"), (2, ", or request fewer nodes")]
)
def test_fewer_nodes_are_suggested_only_if_the_limit_of_the_tenant_allows_any(
    limit: int, end: str
) -> None:
    reason = because(
        Code.TENANT_LIMIT, tenant="t", limit=limit, resource="instances", used=0, needed=3
    )
    assert reason.suggestion.startswith(
        "raise `max-servers` of tenant t"
    ) and reason.suggestion.endswith(end)


@pytest.mark.parametrize(
    ("limit", "end"), [(0, "of pool main"), (2, ", or request fewer or smaller nodes")]
)
def test_fewer_nodes_are_suggested_only_if_the_limit_of_the_pool_allows_any(
    limit: int, end: str
) -> None:
    exceeded = because(
        Code.POOL_LIMIT, name="main", resource="cores", needed=4, left=limit, limit=limit
    )
    suggestion = because(Declined.OVER_LIMIT, limit=exceeded).suggestion
    assert suggestion.startswith("raise `max-cores` of pool main") and suggestion.endswith(end)


@pytest.mark.parametrize(
    "code",
    [code for code in Declined if code not in (Declined.NOT_OFFERED, Declined.LABEL_PROBLEM)],
)
def test_each_reason_to_decline_has_its_own_remedy(code: Declined) -> None:
    names = {name: f"<{name}>" for name in re.findall(r"\{(\w+)\}", code.value)}
    limit = because(Code.POOL_LIMIT, name="main", resource="cores", needed=4, left=2, limit=2)
    suggestion = because(code, **{**names, "limit": limit}).suggestion
    assert suggestion and "what the message names" not in suggestion


def test_words_are_unlike() -> None:
    assert len({code.word for code in Code}) == len(Code) == len({code.value for code in Code})


@pytest.mark.parametrize(
    ("paused", "accepted", "expected"),
    [
        (True, True, because(Code.PAUSED, why="no quota")),
        (False, True, because(Code.LAUNCHING)),
        (False, False, because(Code.NOT_LOOKED_AT)),
    ],
)
def test_request_that_no_pool_has_accepted_is_not_shown_as_launching(
    paused: bool, accepted: bool, expected: Reason
) -> None:
    request = SimpleNamespace(node_types=["small"], state="requested")
    handler = SimpleNamespace(
        paused=paused,
        accepted=accepted,
        shortage=None,
        request=request,
        pw=SimpleNamespace(capacity=SimpleNamespace(label="p-main")),
    )
    launcher: Any = SimpleNamespace(
        assignment=SimpleNamespace(explain=list),
        state=SimpleNamespace(handlers={"200-0000000001": handler}),
    )
    assert NodePool.explain(launcher) == [
        ("200-0000000001", ("small",), "requested", (expected.at("p-main"),))
    ]
