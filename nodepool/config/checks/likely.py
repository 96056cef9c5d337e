"""Find probable mistakes in valid configurations; all are warnings."""

from __future__ import annotations

import base64
import binascii
import importlib.util
import math
import os
import pathlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from nodepool.base.names import did_you_mean
from nodepool.config.checks.crosschecks import Finding, options_of
from nodepool.config.diskimages import Verify

CONNECTION_TYPES = ("ssh", "network_cli", "winrm", "kubectl", "namespace", "project", "local")
#: No host has more processors.
MOST_CPUS = 256
Place = tuple[Any, ...]
_DRIVERS = pathlib.Path(__file__).parents[2] / "driver"


def warning(text: str, *where: object) -> Finding:
    return Finding(text, where, error=False, fatal=False)


def entries(value: object) -> Iterator[tuple[int, dict[str, Any]]]:
    for index, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, dict):
            yield index, item


def likely_mistakes(data: dict[str, Any]) -> Iterator[Finding]:
    """Find options that are valid, but probably not intended."""
    capacity: dict[str, float] = defaultdict(float)
    access = data.get("access")
    certificates = isinstance(access, dict) and bool(access.get("certificates"))
    for index, item in entries(data.get("providers")):
        where: Place = ("providers", index)
        driver = item.get("driver", "openstack")
        # The pools of other drivers are not known here.
        if not item.get("pools") and isinstance(driver, str) and (_DRIVERS / driver).is_dir():
            yield warning("the provider has no pools, so it offers no labels", *where)
        yield from _connection_types(item, where)
        if driver == "nodemanager":
            yield from _slivers(item, where, certificates)
        for number, pool in entries(item.get("pools")):
            here = (*where, "pools", number)
            yield from _static_nodes(pool, here)
        for place, name, options in offered_labels(item):
            capacity[name] += _capacity(driver, item, item["pools"][place[1]], options)
    for index, label in entries(data.get("labels")):
        wanted, most = label.get("min-ready"), capacity.get(str(label.get("name")), math.inf)
        if isinstance(wanted, int) and wanted > most > 0:
            text = (
                f"min-ready {wanted} cannot be reached: the pools that offer the label have "
                f"{most:g} nodes at most"
            )
            yield warning(text, "labels", index, "min-ready")
    held = data.get("max-hold-age")
    for index, image in entries(data.get("diskimages")):
        verify = image.get("verify")
        limit = verify.get("timeout", Verify.TIMEOUT) if isinstance(verify, dict) else None
        if isinstance(held, int) and isinstance(limit, int) and 0 < held < limit:
            text = (
                f"no upload is verified, so none is used: max-hold-age {held} is shorter than the "
                f"timeout, {limit} s"
            )
            yield warning(text, "diskimages", index, "verify")


def offered_labels(provider: dict[str, Any]) -> Iterator[tuple[Place, str, dict[str, Any]]]:
    """Yield position, name and options of each label that a provider offers.

    A label of a static node has the options of its node.
    """
    for index, pool in entries(provider.get("pools")):
        offered = pool.get("labels")
        for number, label in enumerate(offered if isinstance(offered, list) else ()):
            options = label if isinstance(label, dict) else {"name": label}
            if isinstance(options.get("name"), str):
                yield ("pools", index, "labels", number), options["name"], options
        for number, node in entries(pool.get("nodes")):
            names = node.get("labels")
            for name in (
                names.split()
                if isinstance(names, str)
                else names
                if isinstance(names, list)
                else ()
            ):
                if isinstance(name, str):
                    yield ("pools", index, "nodes", number, "labels"), name, node


def _capacity(
    driver: object, provider: dict[str, Any], pool: dict[str, Any], options: dict[str, Any]
) -> float:
    """Return the maximum number of nodes of a label that a pool can have."""
    given = (
        [options.get("max-parallel-jobs", 1)]
        if driver == "static"
        else [pool.get("max-servers"), provider.get("max-servers")]
    )
    return min((value for value in given if isinstance(value, int)), default=math.inf)


def _connection_types(value: object, where: Place) -> Iterator[Finding]:
    for place, item in options_of(value, where):
        if (
            place[-1] == "connection-type"
            and isinstance(item, str)
            and item not in CONNECTION_TYPES
        ):
            meant = (
                did_you_mean(item, CONNECTION_TYPES) or f"; known are {', '.join(CONNECTION_TYPES)}"
            )
            yield warning(f"unknown connection type {item}{meant}", *place)


def _static_nodes(pool: dict[str, Any], where: Place) -> Iterator[Finding]:
    for index, node in entries(pool.get("nodes")):
        here = (*where, "nodes", index)
        host, _, port = str(node.get("name")).rpartition(":")
        if host and ":" not in host and port.isdecimal():
            yield warning(
                f"a name has no port: use `name: {host}` and `connection-port: {port}`",
                *here,
                "name",
            )
        keys = node.get("host-key")
        for number, key in enumerate(
            [keys] if isinstance(keys, str) else keys if isinstance(keys, list) else ()
        ):
            place = (*here, "host-key", number) if isinstance(keys, list) else (*here, "host-key")
            if isinstance(key, str) and (problem := key_problem(key)):
                yield warning(
                    f"{problem}, so the host is never usable; `ssh-keyscan "
                    f"{host or node.get('name')}` prints it",
                    *place,
                )


def _slivers(provider: dict[str, Any], where: Place, certificates: bool) -> Iterator[Finding]:
    """Find mistakes of labels.

    :param certificates: those of leases open slivers without a key in the configuration.
    """
    yield from _ssh_keys(provider, where)
    for number, pool in entries(provider.get("pools")):
        for index, label in entries(pool.get("labels")):
            here = (*where, "pools", number, "labels", index)
            yield from _ssh_keys(label, here)
            if not (certificates or label.get("ssh-keys") or provider.get("ssh-keys")):
                yield warning(
                    f"label {label.get('name')} has no ssh-keys, so nobody can log in to its nodes",
                    *here,
                )
            for option in ("cpus", "cpu-limit"):
                value = label.get(option)
                if (
                    isinstance(value, int | float)
                    and not isinstance(value, bool)
                    and value > MOST_CPUS
                ):
                    yield warning(
                        f"{value:g} is more than any host has: the unit is whole processors",
                        *here,
                        option,
                    )


def _ssh_keys(entry: dict[str, Any], where: Place) -> Iterator[Finding]:
    keys = entry.get("ssh-keys")
    lines = keys.splitlines() if isinstance(keys, str) else keys if isinstance(keys, list) else ()
    for line in lines:
        if not isinstance(line, str) or not line.strip() or line.lstrip().startswith("#"):
            continue
        if line.strip().startswith(("/", "~", "./")):
            text = (
                f"{line.strip()} is a path; write the content of the file, as `ssh-ed25519 "
                "AAAA... comment`"
            )
            yield warning(text, *where, "ssh-keys")
        elif not any(len(word) > 40 for word in line.split()):
            yield warning(
                f"not a public key, as `ssh-ed25519 AAAA... comment`: {line.strip()[:40]}",
                *where,
                "ssh-keys",
            )


def key_problem(key: str) -> str | None:
    """Return why a text is not an SSH host key; None: it may be one."""
    words = key.split()
    if len(words) < 2:
        return "not an SSH host key, which has a type and base64 text"
    kind = words[0]
    try:
        blob = base64.b64decode(words[1], validate=True)
    except (binascii.Error, ValueError):
        return f"the base64 text of the {kind} host key is damaged"
    length = int.from_bytes(blob[:4], "big")
    if blob[4 : 4 + length] != kind.encode() or len(blob) <= 4 + length:
        return f"the text of the host key is not of type {kind}"
    return None


def missing_elements(data: dict[str, Any]) -> Iterator[Finding]:
    """Find elements of disk images that no directory on this machine contains.

    Return nothing if the directories are on another machine.
    """
    directories = [
        os.path.expanduser(one) for one in str(data.get("elements-dir") or "").split(":") if one
    ]
    found = importlib.util.find_spec("diskimage_builder")
    if (
        found is None
        or not found.submodule_search_locations
        or not all(os.path.isdir(one) for one in directories)
    ):
        return
    directories.append(str(pathlib.Path(found.submodule_search_locations[0]) / "elements"))
    for index, image in entries(data.get("diskimages")):
        elements = image.get("elements")
        if image.get("dib-cmd"):
            continue
        for number, element in enumerate(elements if isinstance(elements, list) else ()):
            if isinstance(element, str) and not any(
                os.path.isdir(os.path.join(one, element)) for one in directories
            ):
                text = (
                    f"no directory of elements-dir has element {element}, nor has diskimage-builder"
                )
                yield warning(text, "diskimages", index, "elements", number)
