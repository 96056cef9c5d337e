"""The program ``nodepool-github``."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import voluptuous as v

from nodepool.adapters.runners import program
from nodepool.adapters.runners.program import FLEET, NODEPOOL, ConfigError, Pools, needing

with needing("github"):
    from nodepool.adapters.github.listener import CLOSE, ScaleSet, Settings
    from nodepool.adapters.github.service import Place, Service, app_token

PROGRAM = "nodepool-github"
LISTEN = "127.0.0.1:8010"
#: Seconds between two looks whether the jobs of a set have ended.
LOOK = 10.0
APP = v.Schema(
    {
        v.Required("client-id"): v.Coerce(str),
        v.Required("installation"): v.Coerce(str),
        v.Required("key-file"): str,
    }
)
SCALE_SET = v.Schema(
    {
        v.Required("name"): v.All(
            str, v.Match(r"^[A-Za-z0-9._-]{1,64}$", "letters, digits, '.', '_' and '-', at most 64")
        ),
        **FLEET,
        "group": str,
        "labels": [str],
        "folder": v.All(str, v.Match("^/", "an absolute path")),
    }
)
SCHEMA = v.Schema(
    {
        v.Required("nodepool", default={}): NODEPOOL,
        v.Required("github"): {
            v.Required("url"): str,
            "token-file": str,
            "app": APP,
            "ca-file": str,
        },
        v.Required("scale-sets"): v.All([SCALE_SET], v.Length(min=1)),
        v.Required("listen", default=LISTEN): str,
    }
)


class GitHub(program.Service):
    """The daemon's own part: all scale sets of the configuration."""

    def __init__(self, config: Mapping[str, Any], pools: Pools, stopping: threading.Event) -> None:
        self.service = service_of(config["github"], stopping)
        self.sets = [
            ScaleSet(settings, self.service, pools, stopping) for settings in settings_of(config)
        ]
        self.fleets = [one.fleet for one in self.sets]

    def start(self) -> None:
        for one in self.sets:
            one.start()

    def join(self, timeout: float) -> None:
        closing = [
            threading.Thread(target=one.close, name=f"close-{one.name}", daemon=True)
            for one in self.sets
        ]
        deadline = time.monotonic() + max(timeout, CLOSE)
        for thread in closing:
            thread.start()
        for each in closing:
            each.join(max(0.0, deadline - time.monotonic()))
        for one in self.sets:
            one.join(max(0.0, deadline - time.monotonic()))

    def status(self) -> Mapping[str, object]:
        fleets = [one.status() for one in self.sets]
        return {
            "trouble": [f"{one['name']}: {one['trouble']}" for one in fleets if one["trouble"]],
            "fleets": fleets,
        }


def settings_of(config: Mapping[str, Any]) -> list[Settings]:
    """Return the configured scale sets.

    :raises ConfigError: a name is used twice, or numbers contradict each other.
    """
    found: dict[str, Settings] = {}
    for entry in config["scale-sets"]:
        name = entry["name"]
        if name in found:
            raise ConfigError(f"scale-sets: {name} is there twice")
        given = {option: entry[option] for option in ("group", "folder") if option in entry}
        kind = program.kind_of(name, {"label": name, **entry}, config["github"]["url"].rstrip("/"))
        found[name] = Settings(kind, labels=tuple(entry.get("labels", ())), **given)
    return list(found.values())


def service_of(section: Mapping[str, Any], stopping: threading.Event) -> Service:
    """Return the service for the section ``github``.

    :raises ConfigError: credentials are missing or cannot be used.
    """
    place, app, path = (
        Place.read(section["url"]),
        section.get("app"),
        str(section.get("token-file", "")),
    )
    if (app is None) == (not path):
        raise ConfigError("github: give either token-file or app")
    certificates = section.get("ca-file", "")
    if app is None:
        return Service(place, program.secret_file(path), stopping, certificates=certificates)
    key = program.secret_file(app["key-file"], any_text=True)
    app_token(app["client-id"], key())
    return Service(
        place,
        lambda: app_token(app["client-id"], key()),
        stopping,
        app["installation"],
        certificates,
    )


def remove(config: Mapping[str, Any], name: str) -> None:
    """Delete a scale set, after its jobs have ended."""
    stopping = threading.Event()
    service = service_of(config["github"], stopping)
    known = {settings.kind.name: settings for settings in settings_of(config)}
    group = service.group(known[name].group if name in known else "default")
    while True:
        found = service.find(name, group)
        if found is None:
            raise ConfigError(f"there is no scale set {name}")
        statistics = found.get("statistics")
        jobs = statistics.get("totalAssignedJobs") if isinstance(statistics, dict) else 0
        if not jobs:
            break
        print(f"{name}: {jobs} jobs have not ended; waiting", flush=True)
        stopping.wait(LOOK)
    service.delete(int(str(found["id"])))
    print(
        f"{name}: deleted. Stop the daemon, or remove it from the configuration: it would be "
        "created again"
    )


def create_parser() -> argparse.ArgumentParser:
    made, commands = program.parser(
        PROGRAM, "GitHub Actions: run each job of a scale set on a node of the pool."
    )
    text = "delete a scale set, after its jobs have ended"
    commands.add_parser("remove", help=text, description=text).add_argument("name", metavar="NAME")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit status."""
    args = create_parser().parse_args(argv)
    with program.reported():
        if args.command == "remove":
            remove(program.read_config(args.config, SCHEMA), args.name)
        else:
            program.run(args, PROGRAM, SCHEMA, GitHub)
    return 0


if __name__ == "__main__":
    sys.exit(main())
