"""Declared options: schema, loading and reference are generated from one declaration."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest
import voluptuous as v

from nodepool.base.config_value import ConfigValue
from nodepool.base.option import (
    REQUIRED,
    Each,
    Section,
    a_list,
    changed,
    entries,
    inherited,
    load,
    option,
    rows,
    schema,
    whole,
)
from nodepool.config.model import ConfigPool
from nodepool.exceptions import ConfigError


def _check(options: dict[str, Any]) -> dict[str, Any]:
    raise v.Invalid("all together")


class Disk(ConfigValue):
    size: int = option(int, 10, "GiB", key=v.Required)
    kind: str = option(str, "ssd", "type", name="type")
    labels: list[str] = option([str], [], "labels")
    encrypted: bool = option(bool, False, "encrypt it")
    keys: dict[str, str] | None = option(
        v.Any(str, {"id": option(str, REQUIRED, "id")}), None, "keys"
    )
    zone: str = option(str, inherited("pool"), "zone")
    old: object = option(str, None, "not stored", stored=False)

    def __init__(self, pool: object = None) -> None:
        self.pool = pool


class Large(Disk):
    checks = (_check,)
    size = changed(Disk.size, default=100)
    kind = changed(Disk.kind, hidden=True)


class Pool(ConfigValue):
    disk_class = Disk
    zone: str = option(str, REQUIRED, "zone")
    disks: list[Disk] = option(Each("disk_class"), [], "disks")

    def __init__(self, **options: object) -> None:
        load(self, options)


def test_options_that_are_given_are_stored() -> None:
    disk = Disk(Pool(zone="a"))
    load(
        disk,
        {
            "size": 5,
            "type": "hdd",
            "labels": ["x"],
            "encrypted": 1,
            "keys": {"id": "k"},
            "zone": "b",
            "old": "x",
        },
    )
    assert vars(disk) == {
        "pool": disk.pool,
        "size": 5,
        "kind": "hdd",
        "labels": ["x"],
        "encrypted": True,
        "keys": {"id": "k"},
        "zone": "b",
    }


def test_options_that_are_omitted_have_their_defaults() -> None:
    one, two = Disk(Pool(zone="a")), Large(Pool(zone="a"))
    load(one, {"labels": None})
    load(two, {})
    assert (one.size, one.kind, one.labels, one.encrypted, one.keys, one.zone) == (
        10,
        "ssd",
        [],
        False,
        None,
        "a",
    )
    assert (two.size, two.kind) == (100, "ssd")
    one.labels.append("x")
    assert two.labels == []


def test_objects_that_are_not_loaded_have_defaults() -> None:
    assert (Disk().size, Disk().labels, vars(Disk())) == (10, [], {"pool": None})
    assert Pool.__new__(Pool).zone is None


@pytest.mark.parametrize(
    ("cls", "options", "where"), [(Pool, {}, ()), (Disk, {"keys": {}}, ("keys",))]
)
def test_a_missing_option_is_an_error_with_its_place(
    cls: type[Any], options: dict[str, Any], where: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=r"required key '(zone|id)' is missing") as error:
        load(cls.__new__(cls) if cls is Pool else Disk(Pool(zone="a")), options)
    assert error.value.where == where


def test_the_schema_has_the_checks_of_bases_and_of_parts() -> None:
    own = schema(Disk)
    assert own == {
        "size": int,
        "type": str,
        "labels": [str],
        "encrypted": bool,
        "keys": own["keys"],
        "zone": str,
        "old": str,
    }
    assert [str(key) for key in own if isinstance(key, v.Required)] == ["size"]
    assert own["keys"].validators == (str, {"id": str})
    assert schema(Pool, Pool)["disks"][0].keys() == own.keys()
    with pytest.raises(v.Invalid, match="all together"):
        v.Schema(schema(Large))({"size": 1})
    with pytest.raises(v.Invalid, match="extra keys"):
        v.Schema(schema(Large))({"size": 1, "type": "x"})


def test_the_reference_has_every_option_with_its_path() -> None:
    found = {".".join(path): each.doc for path, each in rows(Pool, Pool)}
    assert found.keys() == {
        "zone",
        "disks",
        *(f"disks.{name}" for name in schema(Disk)),
        "disks.keys.id",
    }
    assert found["disks.size"] == "GiB"


def test_flat_options_are_those_of_the_object_and_kept_by_name() -> None:
    class Container(ConfigValue):
        options: dict[str, Any] = option(
            {"image": option(str, "x", "image"), "env": option([str], [], "env")}, {}, "", flat=True
        )

    found = Container()
    load(found, {"env": ["a"]})
    assert vars(found) == {"options": {"image": "x", "env": ["a"]}}
    assert schema(Container) == {"image": str, "env": [str]}
    assert [path for path, _option in rows(Container)] == [("image",), ("env",)]


def test_classes_without_declarations_keep_their_common_options() -> None:
    class Other(ConfigPool):
        def load(self, pool_config: dict[str, Any], *args: object, **kwargs: object) -> None:
            super().load(pool_config)

    pool = Other()
    pool.load({"max-servers": 3, "size": 1})
    assert (pool.max_servers, pool.priority, pool.node_attributes) == (3, None, None)
    assert not hasattr(pool, "size")


class Port(Section):
    number: int = option(int, 22, "port", convert=whole)
    speed: float = option(float, 1.5, "MiB/s", convert=float)


class Host(Section):
    port: Port = option(Port, cast(Any, {}), "port", convert=Port)
    tags: list[str] = option([str], [], "tags", convert=a_list, merge=lambda old, new: old + new)
    meta: dict[str, Any] = option(dict, {}, "notes")
    name: str = option(str, "x", "name")


def test_a_section_is_an_object_with_its_own_options() -> None:
    assert Host() == Host({}) and Host({"port": None}).port.number == 22
    found = Host({"port": {"number": 5}})
    assert (found.port.number, found.port.speed) == (5, 1.5)
    assert found != Host()
    assert schema(Host)["port"] == {"number": int, "speed": float}
    assert [path for path, _ in rows(Host)][:3] == [
        ("port",),
        ("port", "number"),
        ("port", "speed"),
    ]


@pytest.mark.parametrize(
    ("options", "where", "text"),
    [
        ({"port": 5}, ("port",), "port: expected a dictionary"),
        ({"port": {"number": "x"}}, ("port", "number"), "number: expected a whole number, not 'x'"),
        ({"port": {"number": [5]}}, ("port", "number"), "number: expected a whole number, not [5]"),
        ({"port": {"speed": "x"}}, ("port", "speed"), "speed: expected a number, not 'x'"),
        ({"port": {"speed": []}}, ("port", "speed"), "speed: expected a number, not []"),
        ({"tags": "a"}, ("tags",), "tags: expected a list, not 'a'"),
        ({"meta": "a"}, ("meta",), "meta: expected a dictionary"),
    ],
)
def test_values_that_cannot_be_converted_are_errors_with_their_place(
    options: dict[str, Any], where: tuple[str, ...], text: str
) -> None:
    with pytest.raises(ConfigError) as error:
        Host(options)
    assert (error.value.where, str(error.value)) == (where, text)


def test_digits_in_quotes_are_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert Port({"number": "8005"}).number == 8005
    assert "number: '8005' is taken as the number 8005; remove the quotes" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        assert (Port({"number": 5}).number, Port({"number": 5.5}).number, Disk().encrypted) == (
            5,
            5.5,
            False,
        )
        disk = Disk(Pool(zone="a"))
        load(disk, {"encrypted": "yes"})
    assert caplog.text == ""


def test_part_of_the_options_changes_and_extends_what_is_given() -> None:
    host = Host({"tags": ["a"], "name": "y", "port": {"number": 5}})
    load(host, {"tags": ["b"], "name": None}, part=True)
    assert (host.tags, host.name, host.port.number) == (["a", "b"], "y", 5)
    load(host, {"name": ""}, part=True)
    assert host.name == ""


def test_entries_of_a_list_have_positions_and_names() -> None:
    assert list(entries(None, "labels")) == list(entries([], "labels")) == []
    assert list(entries([{"name": "a"}], "labels")) == [(("labels", 0), {"name": "a"})]


@pytest.mark.parametrize(
    ("value", "where", "text"),
    [
        ("x", ("labels",), "labels: expected a list"),
        ([{"name": "a"}, 1], ("labels", 1), "labels: entry 2 must be a dictionary of options"),
        ([{"name": ""}], ("labels", 0), "required key 'name' is missing in labels"),
    ],
)
def test_wrong_entries_of_a_list_are_errors_with_their_place(
    value: object, where: tuple[object, ...], text: str
) -> None:
    with pytest.raises(ConfigError) as error:
        list(entries(value, "labels"))
    assert (error.value.where, str(error.value)) == (where, text)


@pytest.mark.parametrize("value", [None, [], {}, ""])
def test_empty_value_has_no_entries(value) -> None:
    assert list(entries(value, "labels")) == []


def test_value_that_is_not_a_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="labels: expected a list"):
        list(entries({"name": "small"}, "labels"))
