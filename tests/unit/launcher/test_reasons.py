"""Reasons to wait: values with one renderer (nodepool.reasons)."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.launcher.launcher import NodePool
from nodepool.reasons import Code, Reason, because, render
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
    assert reason.matches(Code.TENANT_LIMIT) and reason.at("p").matches(Code.TENANT_LIMIT, tenant="t")
    assert not reason.matches(Code.TENANT_LIMIT, tenant="u") and not reason.matches(Code.BUSY)
    assert render([reason.at("p-main"), because(Code.OTHER_LAUNCHER)]) == (
        "p-main: tenant t is limited to 3 cores, 3 in use, 1 needed; another launcher can serve it"
    )


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
def test_request_that_no_pool_has_accepted_is_not_said_to_be_launched(paused: bool, accepted: bool, expected: Reason) -> None:
    request = SimpleNamespace(node_types=["small"], state="requested")
    handler = SimpleNamespace(
        paused=paused,
        accepted=accepted,
        shortage=None,
        request=request,
        pw=SimpleNamespace(capacity=SimpleNamespace(label="p-main")),
    )
    launcher: Any = SimpleNamespace(
        assignment=SimpleNamespace(explain=list), state=SimpleNamespace(handlers={"200-0000000001": handler})
    )
    assert NodePool.explain(launcher) == [("200-0000000001", ("small",), "requested", (expected.at("p-main"),))]
