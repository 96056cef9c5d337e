"""Documents of manifests, and the API server's opinion of them."""

from __future__ import annotations

import json
import pathlib
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import Any

import yaml

from tests.support.kubernetes.cluster import Server


def read(*paths: pathlib.Path) -> list[dict[str, Any]]:
    """Return the documents of files."""
    return [each for path in paths for each in parse(path.read_text())]


def parse(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(text) if each]


def complaints(server: Server, documents: Iterable[dict[str, Any]]) -> list[str]:
    """Return what the server refuses or warns about, if these are applied: a dry run.

    Unknown and repeated fields are refused. Namespaces must exist.
    """
    found = []
    for each in documents:
        name = f"{each['kind']} {each['metadata']['name']}"
        try:
            found += [f"{name}: {warning}" for warning in _apply(server, each)]
        except urllib.error.HTTPError as error:
            found.append(f"{name}: {json.loads(error.read())['message']}")
    return found


def _apply(server: Server, document: dict[str, Any]) -> list[str]:
    """Return the server's warnings about a document."""
    query = "dryRun=All&fieldValidation=Strict&fieldManager=test&force=true"
    request = urllib.request.Request(
        f"{server.url}{path_of(server, document)}?{query}",
        json.dumps(document).encode(),
        {"Content-Type": "application/apply-patch+yaml", "Authorization": f"Bearer {server.token}"},
        method="PATCH",
    )
    context = ssl.create_default_context(cafile=server.ca)
    with urllib.request.urlopen(request, timeout=30, context=context) as answer:
        return answer.headers.get_all("Warning") or []


def path_of(server: Server, document: dict[str, Any]) -> str:
    """Return the path of the object that a document describes."""
    version, metadata = document["apiVersion"], document["metadata"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    resource = next(
        each
        for each in server.call("GET", root)["resources"]
        if each["kind"] == document["kind"] and "/" not in each["name"]
    )
    place = f"{root}/namespaces/{metadata['namespace']}" if resource["namespaced"] else root
    return f"{place}/{resource['name']}/{metadata['name']}"
