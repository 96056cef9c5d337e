"""The OpenAPI document, generated from the routes and their types."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from nodepool.version import get_version_string
from nodepool.web.actions import frames
from nodepool.web.actions.bodies import Problem
from nodepool.web.actions.routes import JSON, PROBLEM, Route

TEXT = "text/plain; charset=UTF-8"


def document(routes: list[Route]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these routes."""
    types = [Problem, *(route.body for route in routes if route.body is not None)]
    types += [
        kind
        for route in routes
        for kind in route.answers.values()
        if kind not in (None, str, bytes)
    ]
    unique = list(dict.fromkeys(types))
    references, schemas = msgspec.json.schema_components(
        unique, ref_template="#/components/schemas/{name}"
    )
    of = dict(zip(unique, references, strict=True))
    found: dict[str, dict[str, Any]] = {}
    for route in routes:
        found.setdefault(f"/api/v1{route.path}", {})[route.method.lower()] = _operation(route, of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Nodepool",
            "version": get_version_string(),
            "license": {"name": "Apache-2.0"},
        },
        "paths": found,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _operation(route: Route, of: dict[Any, Any]) -> dict[str, Any]:
    parameters = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1, "pattern": "^[^/]+$"},
        }
        for name in re.findall(r"\{(\w+)\}", route.path)
    ]
    parameters += [
        {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}
        for name, text in route.query.items()
    ]
    answers: dict[str, Any] = {
        str(status.value): {"description": status.phrase, **_content(kind, of)}
        for status, kind in route.answers.items()
    }
    answers["default"] = {"description": "Error", "content": {PROBLEM: {"schema": of[Problem]}}}
    operation: dict[str, Any] = {
        "operationId": route.function.__name__,
        "summary": route.summary,
        "description": "Needs the role "
        f"{route.role.name.lower()}{', or the token of the lease' if route.of_lease else ''}.",
        "parameters": parameters,
        "responses": answers,
    }
    if route.body is not None:
        answers["413"] = {
            "description": "The body has more than 65,536 bytes",
            "content": {PROBLEM: {"schema": of[Problem]}},
        }
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": of[route.body]}}}
    if (route.method, route.path) == ("POST", "/leases"):
        parameters.append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "schema": {"type": "string", "minLength": 1, "maxLength": 255},
                "description": "the same key of the same owner gives the same lease",
            }
        )
    return operation


def _content(kind: type | None, of: dict[Any, Any]) -> dict[str, Any]:
    if kind is None:
        return {}
    if kind is bytes:
        return {
            "content": {frames.CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}}
        }
    return {
        "content": {TEXT: {"schema": {"type": "string"}}}
        if kind is str
        else {JSON: {"schema": of[kind]}}
    }
