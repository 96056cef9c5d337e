"""What the drivers declare in ``nodepool/driver/NAME/quality.yaml`` is complete, and agrees with
their code and tests.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nodepool.config.drivers import BUILTIN_NAMES
from nodepool.config.jsonschema import convert
from nodepool.config.model import get_provider_config
from tests import REPOSITORY

sys.path.append(str(REPOSITORY / "doc" / "ext"))
quality = importlib.import_module("driver_quality")
sys.path.pop()

DRIVERS = REPOSITORY / "nodepool" / "driver"
#: Classes that define what a driver may override; their own methods are defaults.
FRAMEWORK = {
    "Adapter",
    "Provider",
    "StateMachineProvider",
    "ProviderNotifications",
    "LaunchProvider",
    "QuotaSupport",
}

Classes = dict[str, ast.ClassDef]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _folder(driver: str) -> Iterator[Path]:
    yield from sorted((DRIVERS / driver).rglob("*.py"))


@cache
def _classes() -> Classes:
    """Adapters and providers with their base classes by name."""
    return {
        node.name: node
        for path in DRIVERS.rglob("*.py")
        for node in _tree(path).body
        if isinstance(node, ast.ClassDef) and node.name not in FRAMEWORK
    }


def _bases(node: ast.ClassDef, classes: Classes) -> Iterator[ast.ClassDef]:
    """The class and the bases of it that are no defaults of the framework, in the order of
    method resolution.
    """
    yield node
    for base in node.bases:
        name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        if name in classes:
            yield from _bases(classes[name], classes)


def _does_something(function: ast.FunctionDef) -> bool:
    """Whether it calls more of its object than the log and the configuration: defaults return a
    constant or a setting.
    """
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            if called.startswith(("self.", "super().")) and not called.startswith(
                ("self.log.", "self.provider.")
            ):
                return True
    return False


def implements(method: str, own: Classes, classes: Classes) -> bool:
    """Whether an adapter or provider among the classes has the method, and not only a default of
    it.
    """
    for node in own.values():
        for each in _bases(node, classes):
            found = next(
                (f for f in each.body if isinstance(f, ast.FunctionDef) and f.name == method), None
            )
            if found is not None:
                if _does_something(found):
                    return True
                break
    return False


def _own(driver: str) -> Classes:
    return {
        node.name: node
        for path in _folder(driver)
        for node in _tree(path).body
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Adapter", "Provider"))
    }


def _accepts(driver: str, option: str) -> bool:
    """Whether the driver has an option of this name."""
    config = get_provider_config({"name": "fake-x" if driver == "fake" else "x", "driver": driver})
    return f'"{option}": ' in json.dumps(convert(config.getSchema()))


def _methods(*methods: str) -> Callable[[str], bool]:
    return lambda driver: all(implements(method, _own(driver), _classes()) for method in methods)


def _chooses(driver: str) -> bool:
    """Whether the driver chooses hosts, without those that refused."""
    return any(
        isinstance(node, ast.FunctionDef)
        and node.name == "choose"
        and any(argument.arg == "without" for argument in node.args.args)
        for path in _folder(driver)
        for node in ast.walk(_tree(path))
    )


#: Whether the driver follows the rule, as its code shows.
SHOWN: dict[str, Callable[[str], bool]] = {
    "capacity-fallback": lambda driver: _accepts(driver, "alternatives") or _chooses(driver),
    "leaks": _methods("listResources", "deleteResource"),
    "lost-machines": lambda driver: (
        _methods("findMissingInstances")(driver) or _methods("checkNodeLiveness")(driver)
    ),
    "console-log": _methods("getConsoleLog"),
    "cloud-quota": _methods("getQuotaLimits"),
    "spot": lambda driver: _accepts(driver, "use-spot"),
    "image-upload": _methods("uploadImage"),
    "host-keys": lambda driver: _accepts(driver, "host-key-checking"),
}
#: Driver -> the driver whose classes it extends.
INHERITS = {"fake": "openstack", "openshift": "kubernetes", "openshiftpods": "kubernetes"}


def _limits_time(driver: str) -> bool:
    """Whether calls of the driver have limits: by CloudCalls, or their own time-outs."""
    for each in {driver, INHERITS.get(driver, driver)}:
        for path in _folder(each):
            for node in ast.walk(_tree(path)):
                if isinstance(node, ast.Name) and node.id in ("CloudCalls", "MachineAdapter"):
                    return True
                if isinstance(node, ast.keyword) and node.arg == "timeout":
                    return True
    return False


def exists(test: str) -> bool:
    """Whether a folder with tests, a file, or a test or class of tests ``FILE::NAME`` has this
    name.
    """
    name, _, inside = test.partition("::")
    path = REPOSITORY / name
    if not test.startswith("tests/") or not path.exists():
        return False
    if not inside:
        return any(path.rglob("test_*.py")) if path.is_dir() else path.name.startswith("test_")
    return any(
        isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == inside
        for node in _tree(path).body
    )


def wrong(driver: str, marks: dict[str, Any]) -> Iterator[str]:
    """What is missing or untrue in the marks of a driver, as ``rule: what``."""
    known = quality.rules()
    yield from (f"{rule}: is not marked" for rule in known.keys() - marks.keys())
    yield from (f"{rule}: there is no such rule" for rule in marks.keys() - known.keys())
    for rule in known.keys() & marks.keys() - {quality.TESTED}:
        mark = marks[rule]
        if mark != "done" and (
            not isinstance(mark, dict) or len(mark) != 1 or mark.keys() - {"done", "exempt"}
        ):
            yield f"{rule}: must be done or exempt with a reason"
            continue
        done = quality.is_done(mark)
        if not done and not str(mark["exempt"] or "").endswith("."):
            yield f"{rule}: the reason must be a sentence"
        if done and mark != "done" and not exists(str(mark["done"])):
            yield f"{rule}: there is no test {mark['done']}"
        if rule == "restart" and mark == "done":
            yield f"{rule}: must name its test"
        if rule == "deadlines" and done and not _limits_time(driver):
            yield f"{rule}: no limits in the code"
        if rule in SHOWN:
            # Code inherited from another driver may have no effect here, therefore both marks are
            # possible.
            inherited = driver in INHERITS and SHOWN[rule](INHERITS[driver])
            if done and not SHOWN[rule](driver) and not inherited:
                yield f"{rule}: done, but not in the code"
            if not done and SHOWN[rule](driver) and not inherited:
                yield f"{rule}: exempt, but in the code"
    tested = marks.get(quality.TESTED) or {}
    if (
        len(tested.keys() & set(quality.KINDS)) != 1
        or tested.keys() - {*quality.KINDS, "tests"}
        or not tested.get("tests")
    ):
        yield f"{quality.TESTED}: must name one of {', '.join(quality.KINDS)}, and tests"
    yield from (
        f"{quality.TESTED}: there is no test {test}"
        for test in tested.get("tests") or ()
        if not exists(test)
    )


def test_every_driver_has_marks() -> None:
    assert quality.names() == sorted(BUILTIN_NAMES)


def test_the_list_of_rules_is_short() -> None:
    assert 5 <= len(quality.rules()) <= 14


@pytest.mark.parametrize("driver", BUILTIN_NAMES)
def test_marks_agree_with_the_code(driver: str) -> None:
    assert sorted(wrong(driver, quality.marks(driver))) == []


@pytest.mark.parametrize(
    ("driver", "change", "expected"),
    [
        ("aws", {"spot": None}, "spot: must be done or exempt with a reason"),
        ("ibmvpc", {"spot": {"exempt": ""}}, "spot: the reason must be a sentence"),
        ("aws", {"spot": {"exempt": "It has none."}}, "spot: exempt, but in the code"),
        ("openstack", {"spot": "done"}, "spot: done, but not in the code"),
        ("static", {"capacity-fallback": "done"}, "capacity-fallback: done, but not in the code"),
        (
            "openstack",
            {"capacity-fallback": {"exempt": "It has one flavor."}},
            "capacity-fallback: exempt, but in the code",
        ),
        (
            "nodemanager",
            {"capacity-fallback": {"exempt": "It has one host."}},
            "capacity-fallback: exempt, but in the code",
        ),
        ("kubernetes", {"image-upload": "done"}, "image-upload: done, but not in the code"),
        (
            "azure",
            {"image-upload": {"exempt": "It has none."}},
            "image-upload: exempt, but in the code",
        ),
        ("ibmvpc", {"cloud-quota": "done"}, "cloud-quota: done, but not in the code"),
        (
            "gce",
            {"cloud-quota": {"exempt": "It has none."}},
            "cloud-quota: exempt, but in the code",
        ),
        ("ibmvpc", {"console-log": "done"}, "console-log: done, but not in the code"),
        ("metastatic", {"leaks": "done"}, "leaks: done, but not in the code"),
        ("example", {"lost-machines": "done"}, "lost-machines: done, but not in the code"),
        ("test", {"host-keys": "done"}, "host-keys: done, but not in the code"),
        ("example", {"deadlines": "done"}, "deadlines: no limits in the code"),
        ("aws", {"restart": "done"}, "restart: must name its test"),
        (
            "aws",
            {"restart": {"done": "tests/conformance/test_aws.py::TestNothing"}},
            "restart: there is no test tests/conformance/test_aws.py::TestNothing",
        ),
        ("aws", {"speed": "done"}, "speed: there is no such rule"),
        (
            "aws",
            {"tested-against": {"emulator": "moto", "tests": ["tests/integration/nowhere"]}},
            "tested-against: there is no test tests/integration/nowhere",
        ),
        (
            "aws",
            {"tested-against": {"rumor": "moto", "tests": ["tests/integration/aws"]}},
            "tested-against: must name one of real server, emulator, model, and tests",
        ),
    ],
)
def test_a_wrong_mark_is_found(driver: str, change: dict[str, Any], expected: str) -> None:
    assert list(wrong(driver, {**quality.marks(driver), **change})) == [expected]


def test_a_missing_mark_is_found() -> None:
    marks = quality.marks("aws")
    del marks["leaks"]
    assert list(wrong("aws", marks)) == ["leaks: is not marked"]


def test_the_manual_compares_all_drivers() -> None:
    text = "\n".join(quality.lines())
    for driver in BUILTIN_NAMES:
        assert f"* - ``{driver}``" in text
    for rule in quality.rules().values():
        assert rule in text
