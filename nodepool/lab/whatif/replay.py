"""Run a launcher, ZooKeeper and a client in virtual time."""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import threading
from collections.abc import Callable
from typing import Any

import yaml

from nodepool.config.model import Config
from nodepool.lab.simulation import install
from nodepool.lab.simulation.kernel import EPOCH, Kernel
from nodepool.lab.simulation.network import Network
from nodepool.lab.simulation.zookeeper import ADDRESS
from nodepool.lab.whatif.assumptions import Assumptions
from nodepool.lab.whatif.demand import Demand
from nodepool.lab.whatif.measures import SAMPLES, Measures

#: Virtual seconds before the first request, in which ``min-ready`` nodes are launched.
WARM_UP = 1800.0
#: Virtual seconds that requests may wait after the last one was submitted.
PATIENCE = 6 * 3600.0
#: Virtual seconds between two checks of waiting requests without any event. What they wait for in a
#: simulation causes one.
CHECKS_EVERY = 10.0
#: Virtual seconds between two reports and statistics of the launcher.
REPORTS_EVERY = 600.0
#: Distinct messages of the launcher that are part of the result.
MOST_COMPLAINTS = 10
#: Objects allocated between two collections of cyclic garbage.
_GARBAGE = 200_000
#: At the beginning of messages.
_IDS = re.compile(r"(\[[^\]]*\] )+")


def replay(job: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """Run a job in a process whose standard library was replaced; return its measures.

    :param job: as of :func:`make_job`.
    :param progress: called with the completed part in percent.
    """
    install.adapt_libraries()
    return _Run(job).run(progress)


def make_job(
    config: dict[str, Any], demand: list[Demand], assumptions: Assumptions, seed: int
) -> dict[str, Any]:
    """Return a JSON object for :func:`replay`.

    :param config: content of the configuration file; the ZooKeeper of the simulation replaces that
        of the file.
    """
    removed = ("zookeeper-tls", "webapp")
    servers = {
        "zookeeper-servers": [{"host": ADDRESS[0], "port": ADDRESS[1]}],
        "zookeeper-insecure": True,
    }
    return {
        "config": yaml.safe_dump(
            {name: value for name, value in config.items() if name not in removed} | servers
        ),
        "demand": [list(vars(each).values()) for each in demand],
        "assumptions": vars(assumptions),
        "seed": seed,
    }


def _file_in_memory(text: str) -> str:
    """Return the path of a file that ends with this process.

    Configurations contain secrets.
    """
    file = os.memfd_create("nodepool.yaml")
    os.write(file, text.encode())
    return f"/proc/self/fd/{file}"


class _Complaints(logging.Handler):
    """Collects warnings and errors of the launcher.

    It has no lock, since it is also called outside of tasks.
    """

    def __init__(self, config_file: str) -> None:
        super().__init__(logging.WARNING)
        self._config_file = config_file
        #: Counts by text, without the ids of requests and nodes.
        self.texts: dict[str, int] = {}

    def createLock(self) -> None:
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        if record.levelno >= self.level:
            reason = f": {record.exc_info[1]!r}" if record.exc_info else ""
            text = _IDS.sub("", record.getMessage() + reason)
            # Warnings about the configuration are those of the real launcher.
            if self._config_file in text:
                return True
            if text in self.texts or len(self.texts) < MOST_COMPLAINTS:
                self.texts[text] = self.texts.get(text, 0) + 1
        return True


class _Run:
    def __init__(self, job: dict[str, Any]) -> None:
        from nodepool.driver import lifecycle
        from nodepool.lab.whatif import machines
        from nodepool.lab.whatif.client import ReplayClient
        from nodepool.lab.whatif.link import LinkedClient
        from nodepool.lab.zkserver.requests import StandaloneServer
        from nodepool.launcher import report, statistics
        from nodepool.launcher.pools import worker
        from nodepool.zk.connection import client

        self._config_file = _file_in_memory(job["config"])
        self._notes: list[str] = []
        self._demand = [Demand(time, tuple(labels), *more) for time, labels, *more in job["demand"]]
        self._assumptions = assumptions = Assumptions(**job["assumptions"])
        choice = random.Random(job["seed"])
        self._kernel = Kernel(job["seed"], preemption=0.0, delay=0.0)
        install.begin(self._kernel, Network(self._kernel))
        machines.need_no_clouds()
        # Nobody reads them during a run.
        report.INTERVAL = statistics.INTERVAL = REPORTS_EVERY
        worker.TICK = CHECKS_EVERY
        lifecycle.get_provider = lambda provider_config: machines.get_provider(
            provider_config, assumptions, choice
        )
        self._measures = Measures(
            lambda: self._kernel.now, lambda name, nodes: self._client.ended(name, nodes)
        )
        LinkedClient.server = server = StandaloneServer(
            self._measures.observe,
            lambda: self._kernel.now,
            lambda: EPOCH + self._kernel.now,
            self._kernel.random.randbytes,
        )
        vars(client)["SessionClient"] = LinkedClient
        self._client = ReplayClient(self._kernel, server, self._measures.submitted)

    def run(self, progress: Callable[[str], None]) -> dict[str, Any]:
        complaints = _Complaints(self._config_file)
        root = logging.getLogger()
        root.handlers[:] = [complaints]
        root.setLevel(logging.WARNING)
        # The collection is off in simulations, since it would run the rest of killed tasks. None is
        # killed here.
        gc.freeze()
        gc.set_threshold(_GARBAGE, 20, 20)
        gc.enable()
        self._kernel.run(lambda: self._main(progress))
        return {**self._measures.summary(), "notes": self._notes, "complaints": complaints.texts}

    def _main(self, progress: Callable[[str], None]) -> None:
        from nodepool.launcher import NodePool

        kernel, measures = self._kernel, self._measures
        pool = NodePool(None, self._config_file)
        pool.feed.begin = lambda: None  # type: ignore[method-assign]  # nobody reads events
        config = pool.loadConfig()
        self._notes = self._check(config)
        self._client.upload_images(_images(config))
        process = kernel.process("launcher")
        kernel.spawn(threading.Thread(target=pool.start, name="main").start, process=process)
        kernel.sleep(WARM_UP)
        measures.begin()
        self._client.plan(self._demand, kernel.now)
        begin, span = kernel.now, self._demand[-1].time
        step = max(1.0, span / SAMPLES)
        while (
            kernel.now <= begin + span
            or self._client.uses_nodes
            or (measures.open and kernel.now < begin + span + PATIENCE)
        ):
            measures.sample()
            kernel.sleep(step)
            progress(f"{min(100.0, 100 * (kernel.now - begin) / max(span, 1.0)):.0f}")

    def _check(self, config: Config) -> list[str]:
        """Return what limits the result."""
        from nodepool.lab.whatif.machines import unknown_sizes

        notes = [
            f"provider {name} is not simulated: {reason}"
            for name, reason in sorted(config.provider_errors.items())
        ]
        unknown = unknown_sizes(config, self._assumptions)
        notes += [
            f"{text}; the limit has no effect (--assume: labels, resources)" for text in unknown
        ]
        offered = {
            label
            for provider in config.providers.values()
            for pool in provider.pools.values()
            for label in pool.labels
        }
        missing = sorted({label for request in self._demand for label in request.labels} - offered)
        if missing:
            notes.append(f"no pool offers {', '.join(missing)}; requests for it fail")
        return notes


def _images(config: Config) -> list[tuple[str, str]]:
    """Return image and provider of each upload that builders would have made."""
    providers = [provider for provider in config.providers.values() if provider.manage_images]
    return [(name, provider.name) for provider in providers for name in sorted(provider.diskimages)]
