"""Do a build with the client of Zuul; run by `test_other_programs` with the Python that has Zuul.

``python zuul_client.py HOST:PORT CERT KEY CA`` prints a line after each step and waits for a line
on standard input.
"""

import sys
import threading
import time

import opentelemetry.trace
import zuul.model
from opentelemetry.sdk.trace import TracerProvider
from zuul.zk import ZooKeeperClient
from zuul.zk.nodepool import ZooKeeperNodepool


def done(step):
    print(step, flush=True)
    sys.stdin.readline()


def wait_for(condition, what, timeout=60):
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.05)
    return found


def main():
    # Zuul's schedulers always have one.
    opentelemetry.trace.set_tracer_provider(TracerProvider())
    hosts, cert, key, ca = sys.argv[1:]
    client = ZooKeeperClient(hosts, tls_cert=cert, tls_key=key, tls_ca=ca)
    heard = []
    pool = ZooKeeperNodepool(
        client,
        enable_node_request_cache=True,
        enable_node_cache=True,
        node_request_event_callback=lambda *event: heard.append(event),
    )
    client.connect()
    wait_for(pool.getRegisteredLaunchers, "a launcher registers", 20)

    request = zuul.model.NodeRequest(
        "zuul", "uuid", "tenant", "check", "job-uuid", "job", ["small"], None, 0
    )
    pool.submitNodeRequest(request, 200)
    wait_for(
        lambda: pool.getNodeRequest(request.id).state == "fulfilled", "the request is fulfilled"
    )
    wait_for(lambda: heard, "an event of the request")
    request = pool.getNodeRequest(request.id)
    node = zuul.model.Node(None, "small")
    pool.updateNode(node, request.nodes[0])
    pool.lockNode(node, blocking=False)
    node.state = "in-use"
    pool.storeNode(node)
    pool.deleteNodeRequest(request.id)
    done(f"in-use {node.id}")

    # Meanwhile the server was killed and started again.
    wait_for(lambda: client.client.connected, "the client reconnects")
    assert node.lock.is_acquired
    node.comment = "after the restart"
    pool.storeNode(node)

    hold = zuul.model.HoldRequest()
    hold.project, hold.job, hold.ref_filter, hold.reason, hold.max_count = (
        "p",
        "job",
        ".*",
        "why",
        1,
    )
    pool.storeHoldRequest(hold)
    (name,) = pool.getHoldRequests()
    pool.lockHoldRequest(hold)
    assert pool.getHoldRequest(name).reason == "why"
    pool.unlockHoldRequest(hold)
    pool.deleteHoldRequest(hold, None)
    assert not list(pool.getHoldRequests())

    wait_for(
        lambda: [each for each in pool.nodeIterator(cached=True) if each.id == node.id],
        "the node is in the cache",
    )
    node.state = "used"
    pool.storeNode(node)
    pool.unlockNode(node)
    wait_for(lambda: not list(pool.nodeIterator(cached=False)), "the node is deleted")
    wait_for(lambda: not list(pool.nodeIterator(cached=True)), "the node leaves the cache")
    done("deleted")
    client.disconnect()


threading.excepthook = lambda args: print(
    f"thread failed: {args.exc_value!r}", file=sys.stderr, flush=True
)
main()
