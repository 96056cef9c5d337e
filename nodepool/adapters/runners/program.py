"""What the daemons of forges share: configuration, log, signals, status and metrics."""

from __future__ import annotations

import abc
import argparse
import contextlib
import dataclasses
import faulthandler
import http.client
import http.server
import json
import logging
import os
import pathlib
import shutil
import signal
import stat
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from types import FrameType
from typing import Any

import prometheus_client
import voluptuous as v
import yaml
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nodepool import client
from nodepool.adapters.runners.drains import Follower
from nodepool.adapters.runners.fleet import Fleet
from nodepool.adapters.runners.forge import ForgeError, Kind
from nodepool.adapters.runners.runner import BUSY, ENDING, IDLE, STARTING, WAITING
from nodepool.client import SHOWN, NodepoolError, Pool, seconds
from nodepool.texts import one_line, printable

log = logging.getLogger("nodepool.adapters.runners")

#: Seconds for threads to end, and for the answer of a running daemon.
STOP, ANSWER = 5.0, 10.0
STATES = (WAITING, STARTING, IDLE, BUSY, ENDING)


class ConfigError(ForgeError):
    """The configuration, or a file that it names, cannot be used; the text names the place."""


def _time(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise v.Invalid("a time such as 90s, 10m, 4h")
    try:
        return seconds(value)
    except ValueError as error:
        raise v.Invalid(str(error)) from error


TIME = _time
NUMBER = v.All(int, v.Range(min=0))
#: The section ``nodepool``.
NODEPOOL = v.Schema({"url": str, "token-file": str, "ssh-key": str})
#: What a fleet has in each daemon's configuration.
FLEET: Mapping[object, object] = {
    "label": str,
    "min": NUMBER,
    "max": NUMBER,
    "tenant": str,
    "job-time": TIME,
    "idle": TIME,
}

_ATTRIBUTES = {
    "label": "label",
    "min": "least",
    "max": "most",
    "tenant": "tenant",
    "job-time": "job_time",
    "idle": "idle",
}


def kind_of(name: str, entry: Mapping[str, Any], home: str) -> Kind:
    """Return what a checked entry with the keys of `FLEET` describes."""
    given = {
        attribute: entry[option] for option, attribute in _ATTRIBUTES.items() if option in entry
    }
    kind = dataclasses.replace(Kind(name, name, 10, home=home), **given)
    if kind.least > kind.most:
        raise ConfigError(f"{name}: min ({kind.least}) is above max ({kind.most})")
    return kind


def read_config(path: str, schema: v.Schema) -> dict[str, Any]:
    """Return the checked content of a YAML file.

    :raises ConfigError: it cannot be read, or is wrong.
    """
    try:
        found = yaml.safe_load(pathlib.Path(path).read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    try:
        return dict(schema(found))
    except v.MultipleInvalid as error:
        raise ConfigError("\n".join(f"{path}: {each}" for each in error.errors)) from error


def secret_file(path: str, any_text: bool = False) -> client.SecretFile:
    """Return the secret in a file that nobody else may read, and that may be replaced.

    :param any_text: as :func:`nodepool.client.read_secret`.
    :raises ConfigError: it cannot be read, is empty or not a token, or others may read it.
    """
    try:
        return client.SecretFile(path, any_text)
    except (OSError, ValueError) as error:
        raise ConfigError(
            str(error) if str(error).startswith(path) else f"{path}: {error}"
        ) from error


class Service(abc.ABC):
    """A daemon's own part."""

    fleets: Sequence[Fleet]

    @abc.abstractmethod
    def start(self) -> None:
        """Start threads; they end when the event given at creation is set."""

    @abc.abstractmethod
    def join(self, timeout: float) -> None: ...

    @abc.abstractmethod
    def status(self) -> Mapping[str, Any]:
        """Return ``trouble`` and ``fleets``.

        The former is a list of texts, the latter a list of what `Fleet.status` returns, and
        ``notes``.
        """

    def receive(self, path: str, headers: Mapping[str, str], body: bytes) -> int:
        """Return the HTTP status for a message of the forge; by default it sends none here."""
        return 404


#: Makes the service from its checked configuration; the event ends it.
Create = Callable[[Mapping[str, Any], "Pools", threading.Event], Service]


class Pools:
    """Makes the pools of runners: each has a directory for its SSH files.

    :param program: names the directory, unless systemd gives one.
    """

    def __init__(self, section: Mapping[str, object], program: str) -> None:
        self._url, self._key = (
            str(section[name]) if name in section else None for name in ("url", "ssh-key")
        )
        self._token = secret_file(str(section["token-file"])) if "token-file" in section else None
        base = os.environ.get("RUNTIME_DIRECTORY") or os.path.join(
            tempfile.gettempdir(), f"{program}-{os.getuid()}"
        )
        self._base = pathlib.Path(base)
        self._own = self._base / str(os.getpid())
        try:
            Pool(self._url, self._token, self._key)
        except ValueError as error:
            raise ConfigError(f"nodepool: url: {error}") from error

    def open(self) -> None:
        """Make the directory of this process, and remove those of processes that were killed."""
        self._base.mkdir(mode=0o700, exist_ok=True)
        found = self._base.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(f"{self._base} belongs to somebody else; remove it")
        for folder in self._base.iterdir():
            if folder.name.isdecimal() and not os.path.exists(f"/proc/{folder.name}"):
                shutil.rmtree(folder, ignore_errors=True)
        self._own.mkdir(mode=0o700, exist_ok=True)

    def close(self) -> None:
        shutil.rmtree(self._own, ignore_errors=True)

    def __call__(self, runner: str) -> Pool:
        return Pool(
            self._url, self._token, self._key, str(self._own / runner) if runner else None, SHOWN
        )


class Collector:
    """The metrics of a service."""

    def __init__(self, service: Service, program: str) -> None:
        self._service, self._prefix = service, program.replace("-", "_")

    def collect(self) -> Iterator[Metric]:
        runners = GaugeMetricFamily(
            f"{self._prefix}_runners", "Runners by state.", labels=["fleet", "state"]
        )
        wanted = GaugeMetricFamily(
            f"{self._prefix}_wanted", "Runners that the forge's jobs need.", labels=["fleet"]
        )
        ended = CounterMetricFamily(
            f"{self._prefix}_ended", "Runners that have ended in order.", labels=["fleet"]
        )
        failed = CounterMetricFamily(
            f"{self._prefix}_failed", "Runners that have failed.", labels=["fleet"]
        )
        trouble = GaugeMetricFamily(
            f"{self._prefix}_trouble", "What the status reports as trouble."
        )
        conflicts = CounterMetricFamily(
            f"{self._prefix}_session_conflicts",
            "Attempts while another listener had the session.",
            labels=["fleet"],
        )
        for fleet in self._service.fleets:
            name, states = fleet.kind.name, [each.state for each in fleet.runners()]
            for state in STATES:
                runners.add_metric([name, state], states.count(state))
            wanted.add_metric([name], fleet.wanted or 0)
            ended.add_metric([name], fleet.done)
            failed.add_metric([name], fleet.failures)
        status = self._service.status()
        trouble.add_metric([], len(status["trouble"]))
        for each in status["fleets"]:
            if "conflicts" in each:
                conflicts.add_metric([each["name"]], each["conflicts"])
        yield from (runners, wanted, ended, failed, trouble, conflicts)


#: Bytes of a body that is read.
MOST_BODY = 1 << 20


class Listener:
    """Serves ``/status`` (JSON) and ``/metrics``; messages by POST are those of the service.

    :param address: ``host:port``; port 0: any.
    """

    def __init__(self, address: str, service: Service, program: str) -> None:
        registry = prometheus_client.CollectorRegistry()
        registry.register(Collector(service, program))
        host, port = split_address(address)

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = ANSWER

            def do_GET(self) -> None:
                path = urllib.parse.urlsplit(self.path).path
                if path == "/status":
                    self.answer(200, "application/json", json.dumps(service.status()).encode())
                elif path == "/metrics":
                    self.answer(
                        200,
                        prometheus_client.CONTENT_TYPE_LATEST,
                        prometheus_client.generate_latest(registry),
                    )
                else:
                    self.answer(404, "text/plain", b"/status and /metrics are here\n")

            def do_POST(self) -> None:
                text = self.headers.get("Content-Length", "")
                if not text.isdecimal() or int(text) > MOST_BODY:
                    self.close_connection = True
                    self.answer(413, "text/plain", b"")
                    return
                self.answer(
                    service.receive(
                        self.path, dict(self.headers.items()), self.rfile.read(int(text))
                    ),
                    "text/plain",
                    b"",
                )

            def answer(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                log.debug("%s %s", self.address_string(), format % args)

        try:
            self._server = http.server.ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise ConfigError(f"listen: {address}: {error}") from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="listener", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(STOP)


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"listen: {address!r} is not an address such as 127.0.0.1:8010")
    return host.strip("[]"), int(port)


def dump_stacks(_number: int, _frame: FrameType | None) -> None:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        names = ", ".join(
            f"{thread.name} (0x{thread.ident or 0:016x})" for thread in threading.enumerate()
        )
        logging.getLogger("nodepool.stack_dump").warning("Threads: %s\n%s", names, file.read())


def adapt(service: Service, create: Callable[[], Service]) -> None:
    """Apply changed numbers and times to the sets of a service; never raises.

    :param create: makes a service from the changed configuration.
    """
    try:
        known = {fleet.kind.mark: fleet for fleet in service.fleets}
        given = {fleet.kind.mark: fleet.kind for fleet in create().fleets}
    except Exception as error:
        log.error("the changed configuration is not applied: %s", error)
        return
    for mark in known.keys() & given.keys():
        known[mark].adapt(given[mark])
    log.info("sets have the changed min, max, idle, job-time and tenant")
    if other := sorted(known.keys() ^ given.keys()):
        log.warning("new and removed sets need a restart: %s", ", ".join(other))


def _serve(
    service: Service,
    stopping: threading.Event,
    pools: Pools,
    listener: Listener,
    create: Callable[[], Service],
) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stopping.set())
    signal.signal(signal.SIGUSR2, dump_stacks)
    changed = threading.Event()
    signal.signal(signal.SIGHUP, lambda _number, _frame: changed.set())

    def reload() -> None:  # it may call the forges
        while changed.wait() and not stopping.is_set():
            changed.clear()
            adapt(service, create)

    threading.Thread(target=reload, name="reload", daemon=True).start()
    pools.open()
    listener.start()
    Follower(service.fleets, pools(""), stopping).start()
    service.start()
    log.info("started: version %s, process %d", metadata.version("nodepool"), os.getpid())
    # Signals wake this wait; its limit is for systems where they arrive in another thread.
    while not stopping.wait(60.0):
        pass
    log.info("stopping: runners continue, and the next start adopts them")
    changed.set()
    for fleet in service.fleets:
        fleet.stop()
    service.join(STOP)
    listener.stop()
    pools.close()


def ask_status(address: str) -> Mapping[str, object]:
    """Return the status of the daemon that runs here.

    :raises ConfigError: it does not answer.
    """
    host, port = split_address(address)
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER)
    try:
        connection.request("GET", "/status")
        return dict(json.loads(connection.getresponse().read()))
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConfigError(f"no daemon answers at {address}: {error}") from error
    finally:
        connection.close()


def show_status(status: Mapping[str, Any]) -> str:
    """Return the status as text."""
    lines = [f"! {one_line(trouble)}" for trouble in status["trouble"]]
    for fleet in status["fleets"]:
        counts = [each["state"] for each in fleet["runners"]]
        states = (
            ", ".join(f"{counts.count(state)} {state}" for state in STATES if state in counts)
            or "no runners"
        )
        lines.append(
            f"{fleet['name']} (label {fleet['label']}): wanted {fleet['wanted'] or 0} of "
            f"{fleet['most']}; {states}"
        )
        lines += [f"  ! {one_line(fleet['trouble'])}"] if fleet["trouble"] else []
        lines += [f"  {one_line(text)}" for text in fleet.get("notes", ())]
        for each in fleet["runners"]:
            what = "; ".join(one_line(each[name]) for name in ("job", "why") if each[name])
            lines.append(
                f"  {each['name']}  {each['state']} for {each['seconds']} s  lease {each['lease']} "
                f" {what}"
            )
            lines += [f"    ! {one_line(kill)}" for kill in each.get("kills", ())]
    return "\n".join(lines) or "nothing is configured"


class _Formatter(logging.Formatter):
    """Keeps what forges and nodes send within the lines of their records."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record)).replace("\n", "\n  ")


def set_up_log(debug: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, handlers=[handler])
    logging.getLogger("urllib3").setLevel(logging.WARNING)


def parser(
    program: str, description: str
) -> tuple[argparse.ArgumentParser, argparse._SubParsersAction[argparse.ArgumentParser]]:
    """Return the parser of a daemon's program, and its commands, of which there may be more."""
    made = argparse.ArgumentParser(program, description=description)
    made.add_argument(
        "--version", action="version", version=f"Nodepool version: {metadata.version('nodepool')}"
    )
    made.add_argument(
        "-c",
        "--config",
        metavar="FILE",
        default=f"/etc/nodepool/{program.removeprefix('nodepool-')}.yaml",
        help="default: %(default)s",
    )
    made.add_argument("--debug", action="store_true", help="log details")
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in (
        ("run", "serve until SIGTERM"),
        ("check", "check the configuration"),
        ("status", "show what the daemon does now"),
    ):
        commands.add_parser(name, help=text, description=text)
    return made, commands


def run(args: argparse.Namespace, program: str, schema: v.Schema, create: Create) -> None:
    """Run a command that all daemons have.

    :raises ConfigError: the configuration cannot be used, or no daemon answers.
    """
    config = read_config(args.config, schema)
    if args.command == "status":
        print(printable(show_status(ask_status(config["listen"]))))
        return
    stopping, pools = threading.Event(), Pools(config["nodepool"], program)
    service = create(config, pools, stopping)
    if args.command == "check":
        print(f"{args.config}: correct")
        return
    set_up_log(args.debug)
    listener = Listener(config["listen"], service, program)

    def again() -> Service:
        return create(read_config(args.config, schema), pools, stopping)

    _serve(service, stopping, pools, listener, again)


@contextlib.contextmanager
def needing(extra: str) -> Iterator[None]:
    """Let a missing package end the program with a text."""
    try:
        yield
    except ModuleNotFoundError as error:
        sys.exit(
            f"{error.name} is not installed; it comes with the extra: pip install "
            f"'/path/to/clone[{extra}]'"
        )


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Let expected errors end the program with a text and status 1."""
    try:
        yield
    except (ConfigError, NodepoolError) as error:
        sys.exit(printable(str(error)))
