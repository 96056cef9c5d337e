"""Run builds with the client of Zuul, and print what it saw; run with the Python that has Zuul.

``python zuul_client.py NAME HOSTS CERT KEY CA SESSION PER_SECOND`` reads commands from standard
input, one per line, and prints events as JSON, one per line:

``start SEED``   connect, submit requests until ``stop``
``stop``         submit nothing more; ``stopped`` when all builds but those that are kept have ended
``end``          return the nodes that are kept, withdraw what is unknown, disconnect; ``ended``
"""

import contextlib
import json
import random
import sys
import threading
import time

import opentelemetry.trace
import zuul.model
from kazoo.exceptions import KazooException, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError
from opentelemetry.sdk.trace import TracerProvider
from zuul.zk import ZooKeeperClient
from zuul.zk.nodepool import ZooKeeperNodepool

#: Kinds of builds: label and share of the requests.
LABELS = {"plain": 0.75, "slot": 0.25}
#: Most builds at a time.
MOST = 40
#: Seconds that a build uses its node, at least and at most.
USE = (0.1, 0.6)
POLL = 0.03
#: Seconds after which a request that has not ended is reported as stuck.
PATIENCE = 45.0
_output = threading.Lock()


def tell(event, **values):
    # The system's monotonic clock is the same in all processes.
    line = json.dumps({"event": event, "t": time.monotonic(), **values})
    with _output:
        print(line, flush=True)


class Abandoned(Exception):
    """The session of this client has ended, or it was restarted."""


class Session:
    """One connection, and the builds on it."""

    def __init__(self, name, hosts, tls, timeout):
        self.requestor = name
        #: Distinguishes requests that get the same id after a loss of data.
        self.serial = f"{name}-{time.monotonic():.3f}"
        self.client = ZooKeeperClient(hosts, timeout=timeout, **tls)
        self.pool = ZooKeeperNodepool(self.client, enable_node_request_cache=True)
        #: Connects for the first time, or disconnects: Zuul's client reports a loss then, too.
        self.ended, self.connecting = False, True
        self.losses = 0
        self.returning = threading.Event()
        self.known = set()
        self.client.on_connection_lost_listeners.append(self._lost)
        self.client.connect()
        self.connecting = False

    def _lost(self):
        if not (self.ended or self.connecting):
            self.losses += 1
            tell("session-lost", client=self.requestor)

    def again(self, call, *args):
        """Repeat a call until it is answered, as Zuul does in its next pass."""
        deadline = time.monotonic() + PATIENCE
        while True:
            if self.ended:
                raise Abandoned
            try:
                return call(*args)
            except NoNodeError:
                raise
            except (KazooException, KazooTimeoutError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def tell(self, event, request, **values):
        tell(event, request=f"{self.serial}-{request}", client=self.requestor, **values)

    def submit(self, label):
        request = zuul.model.NodeRequest(
            self.requestor, "b", "tenant", "check", "j", "job", [label], None, 0
        )
        self.pool.submitNodeRequest(request, 200)
        self.known.add(request.id)
        return request

    def read(self, request_id):
        with contextlib.suppress(NoNodeError):
            return self.again(self.pool.getNodeRequest, request_id)
        return None

    def wait(self, request_id):
        """Return the request when it has ended; None: it no longer exists."""
        deadline, check = time.monotonic() + PATIENCE, time.monotonic() + 2
        while True:
            if self.ended:
                raise Abandoned
            request = self.pool.getNodeRequest(request_id, cached=True)
            now = time.monotonic()
            if now > check:
                # A cache may miss an event.
                request, check = self.read(request_id), now + 2
                if request is None:
                    return None
            if request is not None and request.state in ("fulfilled", "failed"):
                return request
            if now > deadline:
                self.tell("stuck", request_id)
                return None
            time.sleep(POLL)

    def build(self, label, seconds):
        """One build, from the request to the return of its node.

        :param seconds: of use; None: until `returning`.
        """
        began = time.monotonic()
        try:
            request = self.submit(label)
        except (KazooException, KazooTimeoutError) as error:
            # Whether it exists is not known; `clean` withdraws it.
            tell("unacknowledged", client=self.requestor, error=repr(error))
            return
        name = request.id
        self.tell("requested", name, label=label, began=began)
        try:
            done = self.wait(name)
            if done is None:
                self.tell("lost", name)
            elif done.state == "failed":
                self.tell("failed", name)
                self.withdraw(name)
            else:
                self.tell("fulfilled", name, nodes=done.nodes, label=label)
                self.use(name, label, done.nodes[0], seconds)
        except Abandoned:
            self.tell("abandoned", name)
        except (KazooException, KazooTimeoutError) as error:
            self.tell("gave-up", name, error=repr(error))

    def use(self, name, label, node_id, seconds):
        losses = self.losses
        node = zuul.model.Node(None, label)
        self.again(self.pool.updateNode, node, node_id)
        if node.allocated_to != name or node.state != "ready":
            self.tell("unusable", name, node=node_id, state=node.state, owner=node.allocated_to)
            self.withdraw(name)
            return
        try:
            self.pool.lockNode(node, blocking=False)
        except Exception as error:
            self.tell("unlocked", name, error=repr(error))
            self.withdraw(name)
            return
        self.tell("locked", name)
        node.state = "in-use"
        try:
            self.again(self.pool.storeNode, node)
            self.withdraw(name)
            if seconds is None:
                self.keep(name, node, losses)
            else:
                time.sleep(seconds)
            self.tell("releasing", name)
            node.state = "used"
            self.again(self.pool.storeNode, node)
            with contextlib.suppress(NoNodeError):
                self.pool.unlockNode(node)
            self.tell("released", name)
        except (NoNodeError, KazooException, KazooTimeoutError) as error:
            # Without the session there is no lock, and the launcher deletes the node.
            event = "gone" if self.losses == losses else "expired"
            self.tell(event, name, node=node_id, error=repr(error))

    def keep(self, name, node, losses):
        """Use a node until the end of the seed; it must still be ours."""
        self.tell("kept", name, node=node.id, address=node.interface_ip)
        while not self.returning.wait(POLL):
            if self.ended:
                raise Abandoned
        found = zuul.model.Node(None, node.label)
        self.again(self.pool.updateNode, found, node.id)
        if self.losses == losses and found.state != "in-use":
            self.tell("gone", name, node=node.id, error=f"state {found.state}")

    def withdraw(self, name):
        with contextlib.suppress(NoNodeError):
            self.again(self.pool.deleteNodeRequest, name)
        self.tell("withdrawn", name)

    def clean(self):
        """Withdraw requests of ours that were restored, or whose creation was not acknowledged."""
        found = 0
        for name in self.again(self.pool.getNodeRequests):
            request = self.read(name)
            if request is not None and request.requestor == self.requestor:
                with contextlib.suppress(NoNodeError):
                    self.again(self.pool.deleteNodeRequest, name)
                found += 1
        return found


class Load:
    """Starts builds at a rate."""

    def __init__(self, arguments):
        self.name, self.hosts, cert, key, ca, timeout, rate = arguments
        self.tls = {"tls_cert": cert, "tls_key": key, "tls_ca": ca}
        self.timeout, self.pause = float(timeout), 1 / float(rate)
        self.session = None
        self.builds = []
        self.submitting = threading.Event()

    def connect(self):
        self.session = Session(self.name, self.hosts, self.tls, self.timeout)

    def start(self, seed):
        self.chance = random.Random(f"{self.name} {seed}")
        self.connect()
        self.submitting.set()
        for label in LABELS:
            self.build(label, None)
        threading.Thread(target=self.submit, name="submit", daemon=True).start()
        tell("started")

    def build(self, label, seconds):
        thread = threading.Thread(
            target=self.session.build, args=(label, seconds), name=f"build {label}", daemon=True
        )
        thread.kept = seconds is None
        self.builds.append(thread)
        thread.start()

    def submit(self):
        while self.submitting.is_set():
            self.builds = [build for build in self.builds if build.is_alive()]
            if len(self.builds) < MOST:
                label = self.chance.choices(list(LABELS), list(LABELS.values()))[0]
                self.build(label, self.chance.uniform(*USE))
            time.sleep(self.chance.expovariate(1 / self.pause))

    def join(self, builds):
        for build in builds:
            build.join(2 * PATIENCE)

    def stop(self):
        self.submitting.clear()
        self.join([build for build in self.builds if not build.kept])
        tell("stopped")

    def end(self):
        self.session.returning.set()
        self.join(self.builds)
        found = self.session.clean()
        self.session.ended = True
        self.session.client.disconnect()
        tell("ended", unknown=found)


def main():
    # Zuul's schedulers always have one.
    opentelemetry.trace.set_tracer_provider(TracerProvider())
    load = Load(sys.argv[1:])
    tell("ready")
    for line in sys.stdin:
        command, *arguments = line.split()
        getattr(load, command)(*arguments)


threading.excepthook = lambda args: print(
    f"{args.thread.name} failed: {args.exc_value!r}", file=sys.stderr, flush=True
)
main()
