"""What people may see of a configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import voluptuous as v

from nodepool.base.schema import ListOf
from nodepool.config.drivers import drivers
from nodepool.config.model import get_provider_config
from nodepool.config.shown import REDACTED, schema_of, visible

SECRET = "hidden-4711"
#: Of options that nobody has declared.
NAMES = ("api_key", "apikey", "private_key", "pwd", "accessKey", "license", "anything")
FREE = {**dict.fromkeys(NAMES, SECRET), "list": [SECRET, {"name": "DB_PASSWORD", "value": SECRET}]}
ADDRESS = f"https://user:a/{SECRET}@b@host/x?sig={SECRET}&x=1"


def filled(schema: Any, name: str = "") -> Iterator[Any]:
    """Values for a schema with a secret at each place that the schema leaves open."""
    if isinstance(schema, v.Schema):
        yield from filled(schema.schema, name)
    elif isinstance(schema, (v.Any, v.All)):
        for part in schema.validators:
            yield from filled(part, name)
    elif isinstance(schema, (list, ListOf)):
        items = schema if isinstance(schema, list) else [schema.schema]
        yield [value for item in items for value in filled(item, name)]
    elif isinstance(schema, dict):
        options = [
            (key.schema if isinstance(key, v.Marker) else key, item) for key, item in schema.items()
        ]
        values = {key: list(filled(item, key)) for key, item in options if isinstance(key, str)}
        for number in range(max(map(len, values.values()), default=1)):
            yield {key: found[number % len(found)] for key, found in values.items() if found} | FREE
    elif schema in (dict, list, object):
        yield from (FREE, [FREE], SECRET)
    elif schema is str and any(part in name for part in ("password", "token", "secret")):
        yield SECRET
    else:
        yield {str: ADDRESS, int: 5, float: 0.5, bool: True}.get(schema, ADDRESS)


@pytest.mark.parametrize("driver", sorted(drivers().known()))
def test_secret_at_any_free_place_is_never_shown(driver: str) -> None:
    config = get_provider_config({"name": "fake-x" if driver == "fake" else "x", "driver": driver})
    schema = schema_of(config)
    contents = list(filled(schema))
    assert SECRET in json.dumps(contents)
    found = json.dumps([visible(content, schema) for content in contents])
    assert SECRET not in found
    assert "anything" in found and f"https://{REDACTED}@host/x?{REDACTED}" in found


def test_declared_values_are_shown() -> None:
    schema = {
        v.Required("name"): str,
        "max-servers": int,
        "zones": v.Any(str, [str]),
        "key-name": str,
        "host-key": str,
        "limits": {str: int},
        "tags": {str: str},
        "env": [{"name": str, "value": str}],
        "nested": ListOf([{"az": str, "filter": {"name": str, "values": [str]}}]),
        "free": dict,
    }
    clear: dict[str, Any] = {
        "name": "p",
        "max-servers": 5,
        "zones": "a",
        "key-name": "zuul",
        "limits": {"cpu": 7},
    }

    def content(secret: str) -> dict[str, Any]:
        return {
            **clear,
            "host-key": secret,
            "tags": {"a": secret},
            "env": [{"name": secret, "value": secret}],
            "nested": [{"az": "z", "filter": {"name": "n", "values": [secret]}}],
            "free": {"k": [secret, True]},
            "unknown": {"k": secret},
        }

    assert visible(content("s"), schema) == content(REDACTED)
    assert visible({"free": {"pin": 4711}}, schema) == {"free": {"pin": REDACTED}}


@pytest.mark.parametrize(
    "given,expected",
    [
        ("postgres://u:a/b@h/x", f"postgres://{REDACTED}@h/x"),
        ("https://h/x?token=s", f"https://h/x?{REDACTED}"),
        ("/container/blob?sv=1&sig=s", f"/container/blob?{REDACTED}"),
        ("https://h/x", "https://h/x"),
        ("what?", "what?"),
    ],
)
def test_addresses_are_shown_without_users_and_queries(given: str, expected: str) -> None:
    assert visible(given, str) == expected
