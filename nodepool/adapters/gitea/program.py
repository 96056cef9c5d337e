"""The program ``nodepool-gitea``."""

from __future__ import annotations

import argparse
import sys
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import voluptuous as v

from nodepool.adapters.runners import program
from nodepool.adapters.runners.program import FLEET, NODEPOOL, TIME, ConfigError, Pools, needing
from nodepool.client import is_protected

with needing("gitea"):
    from nodepool.adapters.gitea.api import DIALECTS, ForgeConnection
    from nodepool.adapters.gitea.instance import Instance, Runners

PROGRAM = "nodepool-gitea"
LISTEN = "127.0.0.1:8011"
#: Below which webhooks arrive, followed by the name of the instance.
WEBHOOK = "/webhook/"
#: Seconds between two polls, of a lease (the server ends jobs after three hours), and that a runner
#: may be idle.
INTERVAL, JOB_TIME, UNUSED = 5.0, 3 * 3600.0 + 600.0, 600.0


def _url(value: object) -> str:
    parts = urllib.parse.urlsplit(str(value))
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.query
        or parts.fragment
        or parts.username
    ):
        raise v.Invalid("a URL such as https://gitea.example.com")
    if not is_protected(str(value)):
        raise v.Invalid(
            "its token is sent by https only, or to this machine: use https, with ca-file if needed"
        )
    return str(value)


NAME = v.All(
    str, v.Match(r"^[A-Za-z0-9._-]{1,64}$", "letters, digits, '.', '_' and '-', at most 64")
)
LABEL = v.All(str, v.Match(r"^[^:,\s]+$", "a label without ':', ',' and blanks"))
RUNNERS = v.Schema(
    {
        v.Required("runs-on"): v.Any(LABEL, v.All([LABEL], v.Length(min=1))),
        **FLEET,
        "docker": str,
        "command": v.All(str, v.Match(r"\S", "a command")),
    }
)
INSTANCE = v.Schema(
    {
        v.Required("name"): NAME,
        v.Required("url"): _url,
        v.Required("token-file"): str,
        v.Required("type", default="gitea"): v.In(list(DIALECTS)),
        v.Required("interval", default=INTERVAL): v.All(TIME, v.Range(min=1)),
        v.Required("scope", default=""): v.All(
            str,
            v.Match(
                r"^(user|orgs/[^/?#]+|repos/[^/?#]+/[^/?#]+)?$",
                "user, orgs/NAME, or repos/OWNER/NAME; without it all of the instance",
            ),
        ),
        "ca-file": str,
        "webhook-secret-file": str,
        v.Required("runners"): v.All([RUNNERS], v.Length(min=1)),
    }
)
SCHEMA = v.Schema(
    {
        v.Required("nodepool", default={}): NODEPOOL,
        v.Required("instances"): v.All([INSTANCE], v.Length(min=1)),
        v.Required("listen", default=LISTEN): str,
    }
)


class Gitea(program.Service):
    """The daemon's own part: all instances of the configuration."""

    def __init__(self, config: Mapping[str, Any], pools: Pools, stopping: threading.Event) -> None:
        self.instances: dict[str, Instance] = {}
        for entry in config["instances"]:
            if entry["name"] in self.instances:
                raise ConfigError(f"instances: the name {entry['name']} is used twice")
            self.instances[entry["name"]] = instance_of(entry, pools, stopping)
        self.fleets = [
            each.fleet for instance in self.instances.values() for each in instance.runners
        ]

    def start(self) -> None:
        for instance in self.instances.values():
            instance.start()

    def join(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for instance in self.instances.values():
            instance.wake()
        for instance in self.instances.values():
            instance.join(max(0.0, deadline - time.monotonic()))

    def status(self) -> Mapping[str, object]:
        trouble = [
            f"{name}: {instance.trouble}"
            for name, instance in self.instances.items()
            if instance.trouble
        ]
        fleets = [each for instance in self.instances.values() for each in instance.status()]
        return {
            "trouble": [
                *trouble,
                *(f"{each['name']}: {each['trouble']}" for each in fleets if each["trouble"]),
            ],
            "fleets": fleets,
        }

    def receive(self, path: str, headers: Mapping[str, str], body: bytes) -> int:
        """Return the HTTP status for a message of a webhook."""
        instance = self.instances.get(path.removeprefix(WEBHOOK))
        return 404 if instance is None else instance.receive(headers, body)


def instance_of(entry: Mapping[str, Any], pools: Pools, stopping: threading.Event) -> Instance:
    """Return an instance as configured.

    :raises ConfigError: a file cannot be read, or options contradict each other.
    """
    name, kind = entry["name"], entry["type"]
    token = program.secret_file(entry["token-file"])
    api = DIALECTS[kind](ForgeConnection(entry["url"], token, entry["scope"], entry.get("ca-file")))
    secret = None
    if path := entry.get("webhook-secret-file"):
        if api.binds:
            raise ConfigError(
                f"{name}: webhook-secret-file: {kind} sends no messages about jobs; remove it"
            )
        secret = program.secret_file(path, any_text=True)
    found: dict[frozenset[str], Runners] = {}
    for one in entry["runners"]:
        labels = [one["runs-on"]] if isinstance(one["runs-on"], str) else one["runs-on"]
        if frozenset(labels) in found:
            raise ConfigError(f"{name}: runners: runs-on {', '.join(labels)} is there twice")
        if "label" not in one and len(labels) > 1:
            raise ConfigError(f"{name}: runners: runs-on {', '.join(labels)}: label is missing")
        if one.get("min") and api.binds:
            raise ConfigError(
                f"{name}: runners: min: runners of {kind} are made for a job that waits; remove it"
            )
        options = {"label": labels[0], "job-time": JOB_TIME, "idle": UNUSED, **one}
        where = f"docker://{one['docker']}" if "docker" in one else "host"
        found[frozenset(labels)] = Runners(
            program.kind_of(
                f"{name}/{','.join(labels)}",
                options,
                f"{entry['url'].rstrip('/')}/{entry['scope']}",
            ),
            api,
            [f"{label}:{where}" for label in labels],
            one.get("command", api.command),
            pools,
            stopping,
        )
    return Instance(name, api, list(found.values()), entry["interval"], stopping, secret)


def create_parser() -> argparse.ArgumentParser:
    return program.parser(PROGRAM, "Gitea and Forgejo: run each job on a node of the pool.")[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit status."""
    args = create_parser().parse_args(argv)
    with program.reported():
        program.run(args, PROGRAM, SCHEMA, Gitea)
    return 0


if __name__ == "__main__":
    sys.exit(main())
