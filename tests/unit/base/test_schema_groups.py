"""Violations of exclusive groups, and other errors alongside them."""

from __future__ import annotations

import pytest
import voluptuous as v

from nodepool.base.schema import advice, thorough

SCHEMA = {
    "labels": [{v.Exclusive("image", "kind"): str, v.Exclusive("disk", "kind"): str, "cores": int}]
}


def test_violated_group_hides_no_other_error() -> None:
    labels = [{"image": "a", "disk": 1, "cores": "x", "core": 1}, {"cores": "y"}]
    with pytest.raises(v.MultipleInvalid) as found:
        v.Schema(thorough(SCHEMA))({"labels": labels})
    errors = sorted(
        (error.path[1], str(error.path[-1]), error.error_message) for error in found.value.errors
    )
    assert errors == [
        (0, "<kind>", "two or more values in the same group of exclusion 'kind'"),
        (0, "core", "extra keys not allowed"),
        (0, "cores", "expected int"),
        (0, "disk", "expected str"),
        (1, "cores", "expected int"),
    ]
    unknown = next(error for error in found.value.errors if error.path[-1] == "core")
    assert "cores" in advice(thorough(SCHEMA), unknown)


def test_one_option_of_a_group_is_valid() -> None:
    v.Schema(thorough(SCHEMA))({"labels": [{"disk": "b", "cores": 1}]})
