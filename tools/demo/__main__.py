"""The second half of tools/quickstart, which runs in the virtual environment."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import yaml

from nodepool.client import NodepoolError, Pool
from nodepool.lab.dev import certificates
from nodepool.zk import ZooKeeperClient
from nodepool.zk import zookeeper as zk

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import ports
import quickstart_options
from demo import image, slivers
from progress import step

TOOLS = pathlib.Path(__file__).resolve().parent.parent
#: Seconds that a step, and the build of the image, may take on a machine that is slow and busy.
STEP_TIMEOUT, BUILD_TIMEOUT = 300.0, 5400.0
#: Seconds until a daemon that does not end is killed.
STOP_TIMEOUT = 60.0
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def say(text: str) -> None:
    print(text, flush=True)


def program(name: str) -> str:
    return str(pathlib.Path(sys.executable).with_name(name))


def last_line(text: str) -> str:
    return next(
        (line.strip() for line in reversed(text.splitlines()) if line.strip()),
        "nothing was printed",
    )


@dataclass
class Ordered:
    """A request of ours and what happened to it, in milliseconds since its submission."""

    label: str
    driver: str
    request_id: str = ""
    submitted: float = 0.0
    events: dict[str, float] = field(default_factory=dict)
    node: Any = None
    returned: float = 0.0

    def note(self, what: str, when: float | None = None) -> None:
        if what not in self.events:
            self.events[what] = ((when or time.monotonic()) - self.submitted) * 1000
            say(f"  {self.events[what]:8.1f} ms  {self.request_id}  {self.label:7} {what}")


class Demo:
    """Starts, shows and stops everything."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.work = arguments.work or pathlib.Path(tempfile.mkdtemp(prefix="nodepool-quickstart-"))
        #: What has ended that should not have, with its log.
        self.dead: dict[str, str] = {}
        self.stopping = False
        self.processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.server: dict[str, Any] = {}
        self.web_port = ports.reserve()
        self.condition = threading.Condition()
        self.orders: list[Ordered] = []
        self.nodes: list[dict[str, Any]] = []
        self.facade: Any = None
        self.config = self.work / "nodepool.yaml"
        self.slivers = slivers.SliverDemo(self.work)
        self.builds_image = False
        self.images: list[dict[str, Any]] = []

    # -- starting

    def start(self) -> None:
        if self.arguments.zookeeper:
            self._start_zookeeper()
        else:
            self._start_small_zookeeper()
        say(
            f"Starting nodepool-nodemanager ({self.slivers.backend}): it carves this machine into "
            "slivers"
        )
        self.slivers.start()
        if self.slivers.process is not None:
            self._watch("nodepool-nodemanager", self.slivers.process, "nodemanager.log")
        problem = None if self.arguments.no_image else image.obstacle()
        if problem is not None:
            say(f"No image is built: {problem}")
        self.builds_image = not self.arguments.no_image and problem is None
        self._write_config()
        say("Starting nodepool-launcher")
        self._start_daemon("launcher")
        self._wait_ready()
        client = ZooKeeperClient(
            f"127.0.0.1:{self.server['port']}",
            tls_cert=self.server["cert"],
            tls_key=self.server["key"],
            tls_ca=self.server["ca"],
        )
        client.connect(timeout=STEP_TIMEOUT)
        client.state_listeners.append(self._connection_changed)
        self.facade = zk.ZooKeeper(client)
        self.facade.wait_synced(STEP_TIMEOUT)
        self.facade.request_tree.listeners.append(self._request_changed)
        self.facade.node_tree.listeners.append(self._node_changed)
        self.facade.image_tree.listeners.append(lambda _image: self._notify())

    def _start_zookeeper(self) -> None:
        say("Starting ZooKeeper (TLS, loopback only)")
        out = subprocess.run(
            [
                sys.executable,
                str(TOOLS / "zookeeper"),
                "start",
                "--dir",
                str(self.work / "zookeeper"),
            ],
            check=True,
            capture_output=True,
            timeout=STEP_TIMEOUT,
        )
        self.server = json.loads(out.stdout)

    def _start_small_zookeeper(self) -> None:
        say("Starting a small ZooKeeper for demonstrations (TLS, loopback only)")
        certificates.create(self.work)
        files = {name: str(self.work / f"{name}.pem") for name in ("cert", "key", "ca")}
        self.server = {"port": ports.reserve(), **files}
        options = [text for name, path in files.items() for text in (f"--tls-{name}", path)]
        command = [
            sys.executable,
            "-m",
            "nodepool.lab.zkserver",
            "--tls-port",
            str(self.server["port"]),
            *options,
        ]
        self._launch("zookeeper", command, "zookeeper.log")

    def _launch(self, name: str, command: list[str], log: str) -> subprocess.Popen[bytes]:
        with open(self.work / log, "wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.processes.append((name, process))
        self._watch(name, process, log)
        return process

    def _start_daemon(self, name: str) -> None:
        """Start ``nodepool-NAME`` with our configuration."""
        options = ["-f", "-c", str(self.config), "-p", str(self.work / f"{name}.pid")]
        self._launch(f"nodepool-{name}", [program(f"nodepool-{name}"), *options], f"{name}.log")

    def _write_config(self) -> None:
        images = [image.IMAGE] if self.builds_image else []
        self.config.write_text(
            yaml.safe_dump(
                {
                    "zookeeper-servers": [{"host": "127.0.0.1", "port": self.server["port"]}],
                    "zookeeper-tls": {name: self.server[name] for name in ("ca", "cert", "key")},
                    "webapp": {"port": self.web_port, "listen_address": "127.0.0.1"},
                    "access": {
                        "socket": str(self.work / "api.sock"),
                        "certificates": self._certificates(),
                    },
                    **(image.settings(self.work) if self.builds_image else {}),
                    "labels": [{"name": label} for label in ("host", *images)],
                    "providers": [self.slivers.provider(images)],
                },
                sort_keys=False,
            )
        )

    def _certificates(self) -> dict[str, str]:
        """Create the CA of SSH certificates for leases."""
        key = self.work / "ssh_ca"
        if not key.exists():
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)]
            subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, timeout=STEP_TIMEOUT)
        return {"key": str(key), "public": key.with_suffix(".pub").read_text().strip()}

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + STEP_TIMEOUT
        while True:
            try:
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{self.web_port}/ready", timeout=2
                ) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            with self.condition:
                self.check()
                if time.monotonic() > deadline:
                    raise SystemExit(
                        f"nodepool-launcher is not ready after {STEP_TIMEOUT:.0f} s; read "
                        f"{self.work}/launcher.log"
                    )
                self.condition.wait(0.05)

    # -- watching

    def _notify(self) -> None:
        with self.condition:
            self.condition.notify_all()

    def _watch(self, name: str, process: subprocess.Popen[bytes], log: str | None = None) -> None:
        """Notice when a process ends; one with a log is a daemon, and should not."""

        def wait() -> None:
            status = process.wait()
            with self.condition:
                if not self.stopping and log is not None:
                    how = (
                        f"was killed by signal {-status}"
                        if status < 0
                        else f"has ended with status {status}"
                    )
                    self.dead[name] = (
                        f"{name} {how}; read its log, {self.work}/{log}, and start again"
                    )
                self.condition.notify_all()

        threading.Thread(target=wait, name=f"Thread-{name}", daemon=True).start()

    def _connection_changed(self, state: str) -> None:
        # The small one is watched as a process; on a busy machine a session may end although its
        # server lives.
        if state == "LOST" and self.arguments.zookeeper:
            with self.condition:
                if not self.stopping:
                    self.dead["zookeeper"] = (
                        f"ZooKeeper does not answer any more; its log is in {self.work}/zookeeper"
                    )
                self.condition.notify_all()

    def check(self) -> None:
        """:raises SystemExit: a daemon has ended."""
        if self.dead:
            raise SystemExit("\n".join(self.dead.values()))

    def _request_changed(self, request_id: str, _old: Any, new: Any) -> None:
        now = time.monotonic()
        with self.condition:
            for order in self.orders:
                if order.request_id == request_id and new is not None:
                    if new.state in (zk.PENDING, zk.FULFILLED):
                        order.note("accepted", now)
                    if new.state == zk.FULFILLED:
                        self._note_keys(order, new.nodes, now)
                        order.note("ready", now)
                    elif new.state == zk.FAILED:
                        order.note("failed", now)
            self.condition.notify_all()

    def _note_keys(self, order: Ordered, nodes: list[str], now: float) -> None:
        node = self.facade.node_tree.get(nodes[0]) if nodes else None
        if node is not None and node.host_keys:
            order.note(f"keys scanned ({len(node.host_keys)})", now)

    def _node_changed(self, _node_id: str, _old: Any, new: Any) -> None:
        if new is None or not new.allocated_to:
            self._notify()
            return
        now = time.monotonic()
        with self.condition:
            for order in self.orders:
                if order.request_id == new.allocated_to and new.host_keys:
                    order.note(f"keys scanned ({len(new.host_keys)})", now)
            self.condition.notify_all()

    def _wait(
        self, what: str, condition: Any, timeout: float = STEP_TIMEOUT, log: str = "launcher.log"
    ) -> None:
        deadline = time.monotonic() + timeout
        with self.condition:
            while not condition():
                self.check()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise SystemExit(
                        f"{what} took more than {timeout:.0f} s; read {self.work}/{log}"
                    )
                self.condition.wait(left)

    # -- the show

    def order_nodes(self, label: str, count: int, what: str) -> None:
        say(f"\nAsking for {count} nodes made of {what} (times since each request)")
        self.orders = []
        for _ in range(count):
            request = zk.NodeRequest()
            request.state = zk.REQUESTED
            request.node_types = [label]
            request.requestor = "quickstart"
            order = Ordered(label, "nodemanager")
            order.submitted = time.monotonic()
            self.facade.storeNodeRequest(request, priority="200")
            with self.condition:
                order.request_id = request.id or ""
                self.orders.append(order)
                order.note("submitted", order.submitted)
            present = self.facade.request_tree.get(request.id)
            if present is not None:  # it may have proceeded before we knew its id
                self._request_changed(order.request_id, None, present)
        self._wait(
            "Serving the requests",
            lambda: all({"ready", "failed"} & set(o.events) for o in self.orders),
        )
        failed = [o.request_id for o in self.orders if "failed" in o.events]
        if failed:
            raise SystemExit(
                f"requests failed: {', '.join(failed)}; read launcher.log and nodemanager.log in "
                f"{self.work}"
            )

    def log_in(self) -> None:
        say("\nAccepting the nodes and running a command on each")
        with ThreadPoolExecutor(len(self.orders), thread_name_prefix="Thread-ssh") as pool:
            commands = []
            for order in self.orders:
                request = self.facade.getNodeRequest(order.request_id)
                node = self.facade.getNode(request.nodes[0])
                self.facade.lockNode(node, blocking=True, timeout=STEP_TIMEOUT)
                self.facade.deleteNodeRequest(request)
                node.state = zk.IN_USE
                self.facade.storeNode(node)
                order.node = node
                commands.append(pool.submit(self._first_command, order))
            for command in commands:
                command.result()

    def _first_command(self, order: Ordered) -> None:
        node = order.node
        known = self.work / f"known_hosts-{node.id}"
        known.write_text(
            "".join(
                f"[{node.interface_ip}]:{node.connection_port} {key}\n" for key in node.host_keys
            )
        )
        out = subprocess.run(
            [
                "ssh",
                "-i",
                str(self.slivers.key),
                "-p",
                str(node.connection_port),
                "-o",
                "BatchMode=yes",
                "-o",
                f"UserKnownHostsFile={known}",
                "-o",
                "StrictHostKeyChecking=yes",
                "-o",
                f"ConnectTimeout={STEP_TIMEOUT:.0f}",
                f"{node.username}@{node.interface_ip}",
                "echo $(hostname), $(. /etc/os-release; echo $PRETTY_NAME), as $(id -un)",
            ],
            capture_output=True,
            text=True,
            timeout=STEP_TIMEOUT,
            check=False,
        )
        if out.returncode:
            raise SystemExit(
                f"cannot log in to node {node.id}: {last_line(out.stderr)}; read "
                f"{self.work}/nodemanager.log"
            )
        order.note(f"ssh: {out.stdout.strip()}")
        order.events["ssh"] = order.events[f"ssh: {out.stdout.strip()}"]

    def return_nodes(self) -> None:
        say("\nReturning the nodes (times since the return)")
        for order in self.orders:
            order.node.state = zk.USED
            self.facade.storeNode(order.node)
            order.returned = time.monotonic()
            self.facade.unlockNode(order.node)

        def deleted() -> bool:
            now = time.monotonic()
            for order in self.orders:
                if "gone" not in order.events and self.facade.node_tree.get(order.node.id) is None:
                    order.events["gone"] = (now - order.returned) * 1000
                    say(f"  {order.events['gone']:8.1f} ms  node {order.node.id} is deleted")
            return all("gone" in o.events for o in self.orders)

        self._wait("Deleting the nodes", deleted)

    def show(self) -> None:
        """Show everything sequentially."""
        for label, count, what in (
            ("host", 3, "this machine's own system, read-only below a separate disk"),
            *([(image.IMAGE, 2, "the image just built")] if self.builds_image else []),
        ):
            if label != "host":
                self.build_image()
            self.order_nodes(label, count, what)
            self.log_in()
            if label == "host":
                self.slivers.show_limits([o.node for o in self.orders])
            self.return_nodes()
            if label == "host":
                self.lease()
            self.nodes += [
                {
                    "label": o.label,
                    "driver": o.driver,
                    "ready_ms": round(o.events["ready"], 1),
                    "ssh_ms": round(o.events["ssh"], 1),
                    "gone_ms": round(o.events["gone"], 1),
                }
                for o in self.orders
            ]

    def build_image(self) -> None:
        """Build, upload and list an image.

        :raises SystemExit: it could not be built or uploaded.
        """
        nodepool = [program("nodepool"), "-c", str(self.config)]
        say(
            f"\nBuilding a Debian {image.RELEASE} image with diskimage-builder (a few minutes; "
            "--no-image skips it)"
        )
        # Ctrl-C is for us: the build ends with everything else.
        waiting = subprocess.Popen(
            [*nodepool, "image-build", image.IMAGE, "--wait"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._watch("image-build", waiting)
            # A builder that starts first would build the image without a request, and then again
            # for it.
            self._wait(
                "Requesting the image",
                lambda: (
                    waiting.poll() is not None
                    or image.IMAGE in self.facade.image_tree.data().requests
                ),
            )
            self._start_daemon("builder")
            self._wait(
                "Building the image",
                lambda: waiting.poll() is not None,
                BUILD_TIMEOUT,
                "builder.log",
            )
        finally:
            if waiting.poll() is None:
                waiting.kill()
        if waiting.returncode:
            raise SystemExit(
                f"the image was not built; read {self.work}/build-logs, or skip the image "
                "with --no-image"
            )
        with step("Uploading the image to the node manager", sys.stdout):
            self._wait("Uploading the image", self._ready_uploads, log="builder.log")
        for table in ("dib-image-list", "image-list"):
            say(f"\nnodepool {table}")
            subprocess.run([*nodepool, table], check=True, timeout=STEP_TIMEOUT)
        upload = self._ready_uploads()[0]
        build = self.facade.getBuild(image.IMAGE, upload.build_id)
        self.images = [image.summary(self.work, build, upload)]

    def _ready_uploads(self) -> list[Any]:
        return [
            upload for upload in self.facade.image_tree.data().uploads if upload.state == zk.READY
        ]

    def lease(self) -> None:
        """Lease a node as a program would, without ZooKeeper and without an SSH key."""
        say(
            "\nLeasing a node with nodepool.client, through the socket of the launcher (times "
            "since the call)"
        )
        start = time.monotonic()

        def note(text: str) -> None:
            say(f"  {(time.monotonic() - start) * 1000:8.1f} ms  {text}")

        try:
            with Pool(f"unix://{self.work}/api.sock").lease(
                "host", purpose="quickstart", wait=STEP_TIMEOUT
            ) as lease:
                note(f"lease {lease.id}: node {lease.nodes[0].id}, held until this program ends")
                command = "echo $(hostname), as $(id -un)"
                printed = (
                    lease.run(command, timeout=STEP_TIMEOUT, check=True).stdout.decode().strip()
                )
                note(f"a command, relayed by the launcher: {printed}")
                argv = ["ssh", "-F", lease.write_ssh(self.work / "lease"), "n1", command]
                done = subprocess.run(
                    argv, capture_output=True, text=True, timeout=STEP_TIMEOUT, check=True
                )
                note(f"SSH, with a certificate of the lease: {done.stdout.strip()}")
            self._wait(
                "Deleting the node", lambda: self.facade.node_tree.get(lease.nodes[0].id) is None
            )
            note("returned, and the node is deleted")
        except (NodepoolError, subprocess.SubprocessError) as error:
            raise SystemExit(f"the lease failed: {error}; read {self.work}/launcher.log") from error

    def summary(self) -> dict[str, Any]:
        return {
            "nodes": self.nodes,
            "images": self.images,
            "limits": self.slivers.limits,
            "left_behind": [],
        }

    def keep(self) -> None:
        nodepool = f"{program('nodepool')} -c {self.config}"
        say(f"""
It is running; try these in another terminal:

  alias np='{nodepool}'
  np list                         the nodes; more columns with --detail
  np lease host --for 1h          lease a node; prints its address and port
  np lease list                   who has leased what, and for how long
  np lease return                 return it
  export NODEPOOL_URL=unix://{self.work}/api.sock   for programs that use nodepool.client, np mcp
  np request-list                 all requests
  np request create host --count 30    more than this machine can hold: some wait
  np explain request ID           why it waits, what helps, its place in the queue; its page, too
  tail -f {self.work}/launcher.log

  {program("nodepool-nm")} --url {self.slivers.url} top    slivers, live

Log in to a node (its port is in: np list --detail):

  ssh -i {self.slivers.key} -p PORT {self.slivers.username}@127.0.0.1

For a browser: http://127.0.0.1:{self.web_port}/ui/    nodes and requests, what waits and why
For curl: http://127.0.0.1:{self.web_port}/api/v1, /node-list, /request-list, /ready, /metrics

Ctrl-C stops everything.""")
        with contextlib.suppress(KeyboardInterrupt), self.condition:
            while not self.dead:
                self.condition.wait()
        self.check()

    # -- stopping

    def stop(self) -> list[str]:
        """Stop all that was started; return what could not be stopped."""
        with self.condition:
            self.stopping = True
        say("")
        with step("Stopping everything", sys.stdout):
            return self._stop()

    def _stop(self) -> list[str]:
        left: list[str] = []
        if self.facade is not None:
            left += [
                f"node {n.id} ({n.state}): ends with the rest"
                for n in self.facade.nodeIterator(cached=False)
                if n.state in (zk.BUILDING, zk.INIT, zk.USED, zk.DELETING)
            ]
            self.facade.disconnect()
        for name, process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)
                left.append(f"{name} had to be killed; nothing to do")
        left += self.slivers.stop()
        if (self.work / "zookeeper").exists():
            tool = [sys.executable, str(TOOLS / "zookeeper")]
            directory = ["--dir", str(self.work / "zookeeper")]
            subprocess.run(
                [*tool, "stop", *directory], check=False, timeout=60, capture_output=True
            )
            if (
                subprocess.run(
                    [*tool, "status", *directory], check=False, timeout=60, capture_output=True
                ).returncode
                == 0
            ):
                left.append(f"ZooKeeper: {TOOLS}/zookeeper stop --dir {self.work}/zookeeper")
        return left


def interrupt(*_: Any) -> None:
    """Stop what was started, whatever ends this program; further signals are ignored."""
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def write(path: pathlib.Path | None, summary: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(summary, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    arguments: argparse.Namespace = quickstart_options.create_parser().parse_args()
    problem = quickstart_options.obstacle(arguments)
    if problem is not None:
        print(f"tools/quickstart: error: {problem}", file=sys.stderr)
        sys.exit(2)
    return arguments


def main() -> int:
    arguments = parse_arguments()
    demo = Demo(arguments)
    for number in ENDS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup means it
            signal.signal(number, interrupt)
    # Messages of the libraries are of interest only when something goes wrong.
    logging.basicConfig(
        filename=demo.work / "quickstart.log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    summary: dict[str, Any] = {"nodes": [], "images": [], "left_behind": []}
    good = interrupted = False
    try:
        # tools/quickstart blocks them during the imports.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
        demo.start()
        demo.show()
        summary = demo.summary()
        if arguments.keep:
            write(arguments.json, summary)
            demo.keep()
        good = True
    except KeyboardInterrupt:
        interrupted = True
        say("interrupted")
    except Exception as error:
        logging.exception("The demonstration failed")
        say(
            f"{type(error).__name__}: {last_line(str(error))}; read {demo.work}/quickstart.log, "
            "and start again"
        )
    finally:
        summary["left_behind"] = demo.stop()
        write(arguments.json, summary)
        good = good and not summary["left_behind"]
        if good or (interrupted and not summary["left_behind"]):
            shutil.rmtree(demo.work, ignore_errors=True)
        if summary["left_behind"]:
            say("\nLeft behind, and how to remove it:")
            for what in summary["left_behind"]:
                say(f"  {what}")
        if demo.work.exists():
            say(f"The logs are in {demo.work}; when you have read them: rm -r {demo.work}")
    if good:
        say(
            f"\nAll stopped; nothing left behind.\n{len(summary['nodes'])} nodes: ready after "
            + ", ".join(f"{n['ready_ms']:.0f}" for n in summary["nodes"])
            + " ms"
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
