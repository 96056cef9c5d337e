"""config-validate warns about values that are valid and can hardly be meant; the daemons log the
same warnings.
"""

from __future__ import annotations

import base64
import pathlib
from typing import Any

import pytest

from nodepool.config.checks import likely
from nodepool.config.checks.likely import key_problem, likely_mistakes, missing_elements

KIND = "ssh-ed25519"
KEY = (
    f"{KIND} "
    + base64.b64encode(
        len(KIND).to_bytes(4, "big") + KIND.encode() + (32).to_bytes(4, "big") + bytes(32)
    ).decode()
)


def sliver(label: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return {
        "providers": [
            {
                "name": "metal",
                "driver": "nodemanager",
                "ssh-keys": KEY,
                **options,
                "pools": [{"name": "main", "labels": [{"name": "small", **(label or {})}]}],
            }
        ]
    }


def static(**node: Any) -> dict[str, Any]:
    entry = {"name": "host", "labels": "big", **node}
    return {
        "providers": [
            {"name": "rack", "driver": "static", "pools": [{"name": "main", "nodes": [entry]}]}
        ]
    }


@pytest.mark.parametrize(
    "given, text, where",
    [
        (
            sliver(**{"ssh-keys": ""}),
            "nobody can log in",
            ("providers", 0, "pools", 0, "labels", 0),
        ),
        (
            sliver(**{"ssh-keys": "/root/key.pub"}),
            "/root/key.pub is a path",
            ("providers", 0, "ssh-keys"),
        ),
        (
            sliver({"ssh-keys": ["nonsense"]}),
            "not a public key",
            ("providers", 0, "pools", 0, "labels", 0, "ssh-keys"),
        ),
        (
            sliver({"cpus": 400}),
            "more than any host has",
            ("providers", 0, "pools", 0, "labels", 0, "cpus"),
        ),
        (
            static(**{"host-key": "ssh-ed25519 AAAA...EXAMPLE"}),
            "damaged",
            ("providers", 0, "pools", 0, "nodes", 0, "host-key"),
        ),
        (
            static(**{"host-key": [KEY, "AAAA"]}),
            "not an SSH host key",
            ("providers", 0, "pools", 0, "nodes", 0, "host-key", 1),
        ),
        (
            static(name="host:2201"),
            "`name: host` and `connection-port: 2201`",
            ("providers", 0, "pools", 0, "nodes", 0, "name"),
        ),
        (
            static(**{"connection-type": "shh"}),
            "did you mean ssh?",
            ("providers", 0, "pools", 0, "nodes", 0, "connection-type"),
        ),
        ({"providers": [{"name": "east"}]}, "no pools", ("providers", 0)),
        (
            {**static(), "labels": [{"name": "big", "min-ready": 2}]},
            "have 1 nodes at most",
            ("labels", 0, "min-ready"),
        ),
        (
            {
                "labels": [{"name": "l", "min-ready": 3}],
                "providers": [
                    {
                        "name": "p",
                        "pools": [{"name": "main", "max-servers": 2, "labels": [{"name": "l"}]}],
                    }
                ],
            },
            "2 nodes at most",
            ("labels", 0, "min-ready"),
        ),
        (
            {"max-hold-age": 300, "diskimages": [{"name": "debian", "verify": {}}]},
            "max-hold-age 300 is shorter than the timeout, 600 s",
            ("diskimages", 0, "verify"),
        ),
    ],
)
def test_likely_mistake_is_a_warning_with_its_place(
    given: dict[str, Any], text: str, where: tuple[Any, ...]
) -> None:
    (finding,) = likely_mistakes(given)
    assert text in finding.text and finding.where == where
    assert not finding.error and not finding.fatal


@pytest.mark.parametrize(
    "given",
    [
        sliver(),
        {"access": {"certificates": {"key": "/ca"}}, **sliver(**{"ssh-keys": ""})},
        static(**{"host-key": KEY, "connection-type": "winrm"}),
        static(name="fe80::1:22"),
        {"labels": [{"name": "big", "min-ready": 1}], **static()},
        {"max-hold-age": 300, "diskimages": [{"name": "debian", "verify": {"timeout": 300}}]},
        {"diskimages": [{"name": "debian", "verify": {}}]},
    ],
)
def test_good_values_are_not_warned_about(given: dict[str, Any]) -> None:
    assert list(likely_mistakes(given)) == []


def test_key_of_another_type_is_found() -> None:
    assert key_problem(KEY) is None
    assert "not of type ssh-rsa" in str(key_problem(KEY.replace(KIND, "ssh-rsa", 1)))


def test_element_that_no_directory_has_is_found(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "builder" / "elements" / "vm").mkdir(parents=True)

    class Spec:
        submodule_search_locations = (str(tmp_path / "builder"),)

    monkeypatch.setattr(likely.importlib.util, "find_spec", lambda name: Spec)
    given = {
        "elements-dir": str(tmp_path),
        "diskimages": [{"name": "i", "elements": ["own", "vm", "onw"]}],
    }
    (finding,) = missing_elements(given)
    assert "onw" in finding.text and finding.where == ("diskimages", 0, "elements", 2)
    assert list(missing_elements({**given, "elements-dir": str(tmp_path / "elsewhere")})) == []
