"""The generated reference of drivers: every option is there, with its default and meaning."""

from __future__ import annotations

import importlib
import math
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from nodepool.base.option import REQUIRED, inherited, option, rows
from nodepool.config.drivers import BUILTIN_NAMES
from nodepool.config.jsonschema import document
from nodepool.config.model import Config
from tests import REPOSITORY

#: Those whose options are declared.
DRIVERS = (
    "aws",
    "azure",
    "example",
    "gce",
    "ibmvpc",
    "kubernetes",
    "metastatic",
    "nodemanager",
    "openshift",
    "openshiftpods",
    "openstack",
    "static",
)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(REPOSITORY / "doc" / "ext"))
    return importlib.import_module("driver_options")


@pytest.mark.parametrize("driver", DRIVERS)
def test_every_option_has_a_text(reference: Any, driver: str) -> None:
    assert reference.check(driver) == []
    text = "\n".join(reference.lines(driver))
    assert "Options of ``pools``" in text
    assert "\n``name`` : str; required\n" in text


def test_every_option_of_the_node_manager_has_a_text(reference: Any) -> None:
    assert reference.check(reference.NODE_MANAGER) == []
    text = "\n".join(reference.lines(reference.NODE_MANAGER))
    for section in (
        "nodemanager.yaml",
        "api.tls",
        "sources.slices-xml",
        "sources.zookeeper",
        "delegates",
    ):
        assert f"Options of ``{section}``" in text


def test_every_option_of_access_has_a_text(reference: Any) -> None:
    text = "\n".join(reference.lines("access"))
    for section in ("access", "leases", "oidc", "oidc.rules"):
        assert f"Options of ``{section}``" in text


@pytest.mark.parametrize("name", ["nodepool.yaml", "providers", "pools"])
def test_every_common_option_has_a_text(reference: Any, name: str) -> None:
    assert reference.check(name) == []
    assert f"Options of ``{name}``" in reference.lines(name)[0]


def _properties(part: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = part.get("items", part).get("properties", {})
    return found


def test_every_option_of_the_main_file_has_one_line_a_row_and_a_schema(reference: Any) -> None:
    declared = list(rows(Config))
    json_schema = document(())
    assert {path[0] for path, _ in declared} == json_schema["properties"].keys()
    tables = {
        where: {row[0] for row in found} for where, found in reference.sections("nodepool.yaml")
    }
    assert len(declared) == sum(map(len, tables.values()))
    for path, each in declared:
        assert re.fullmatch(r"\S.{5,98}[^\s.]", each.doc), f"{path}: {each.doc!r}"
        assert f"``{path[-1]}``" in tables[".".join(path[:-1]) or "nodepool.yaml"]
        place = json_schema
        for name in path:
            place = _properties(place)[name]


def test_configuration_page_has_the_options_of_every_section_of_the_main_file(
    reference: Any,
) -> None:
    """The section ``access`` has a separate page."""
    page = (REPOSITORY / "doc" / "configuration.rst").read_text()
    assert (
        "\n.. driver-options:: access\n"
        in (REPOSITORY / "doc" / "operation" / "access.rst").read_text()
    )
    top, *inner = [
        where for where, _ in reference.sections("nodepool.yaml") if where.split(".")[0] != "access"
    ]
    for section in ("top", *inner):
        assert f"\n.. driver-options:: {top} {section}\n" in page
        assert (
            len([line for line in reference.lines(top, section) if line.startswith(".. rubric::")])
            == 1
        )
    with pytest.raises(reference.ReferenceError, match=r"nodepool\.yaml has no options in label"):
        reference.lines(top, "label")


@pytest.mark.parametrize("driver", [*DRIVERS, "nodepool.yaml"])
def test_texts_of_defaults_name_existing_options(reference: Any, driver: str) -> None:
    """A text replaces only a default that says nothing, and what it refers to exists."""
    config = reference.class_of(driver)
    declared = dict(rows(config, config))
    for path, each in declared.items():
        if each.shown is None:
            continue
        assert each.default in (None, "", 0, -1, [], {}), f"{path}: the default is shown by itself"
        if holder := re.fullmatch(r"the (provider|pool|label)'s", each.shown):
            where = {"provider": (), "pool": ("pools",), "label": ("pools", "labels")}[holder[1]]
            outer = [
                other
                for other in declared
                if other != path and other[: len(where)] == where and other[-1] == path[-1]
            ]
            assert outer, f"{path}: {holder[1]} has no such option"
        for name in re.findall(r"``([a-z][a-z-]+)``", each.shown):
            known = {other[-1] for other in declared} | set(getattr(each.check, "validators", ()))
            assert name in known, f"{path}: {name} is no option"


def test_what_is_missing_is_named(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = reference.texts("aws")
    said["rate"] = ("2", "")
    monkeypatch.setattr(
        reference, "texts", lambda driver: {**said, "speed": ("1", "no such option")}
    )
    assert reference.check("aws") == [
        "aws: option rate has no text",
        "aws: there is no option speed",
    ]
    with pytest.raises(reference.ReferenceError, match="option rate has no text"):
        reference.lines("aws")


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        (option(bool, True, ""), "true"),
        (option(int, math.inf, ""), "no limit"),
        (option(int, 5, ""), "5"),
        (option(str, "ssh", ""), "``ssh``"),
        (option([str], ["a", "b"], ""), "``a``, ``b``"),
        (option({str: int}, {}, ""), ""),
        (option(str, None, ""), ""),
        (option(str, REQUIRED, ""), ""),
        (option(str, inherited("pool"), ""), "the pool's"),
        (option(int, 0, "", shown=""), ""),
    ],
)
def test_the_default_of_the_declaration_is_shown(
    reference: Any, declared: object, text: str
) -> None:
    assert reference.default_text(declared) == text


def test_manual_is_built(tmp_path: pathlib.Path) -> None:
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            "-W",
            "-q",
            "-b",
            "html",
            str(REPOSITORY / "doc"),
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (built.returncode, built.stderr) == (0, "")
    assert "scheduler-hints" in (tmp_path / "openstack.html").read_text()
    # The reference of all: of each driver, and of the metrics.
    text = (tmp_path / "reference.html").read_text()
    assert [name for name in BUILTIN_NAMES if f"Providers with driver {name}<" not in text] == []
    for each in (
        "cloud-image",
        "tenant-name",
        "host-key-checking",
        "run-dir",
        "nodepool_label_request_wait",
        "nodepool.provider.{provider}.max_servers",
    ):
        assert each in text
    assert "alternatives" in (tmp_path / "aws.html").read_text()
    # The theme shows its own table of contents, and one of a page as an error in a red box.
    assert [
        page.name
        for page in tmp_path.rglob("*.html")
        if re.search(r'class="(?:[^"]* )?contents[ "]', page.read_text())
    ] == []
