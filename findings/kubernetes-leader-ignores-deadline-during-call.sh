#!/bin/sh
# kubernetes 37.0.1 (PyPI), its package leaderelection with a LeaseLock: renew_deadline, which must be shorter than
# lease_duration, is checked between the calls only. The calls have no timeout: if an answer is lost (a connection that a
# firewall has dropped, a server that is stuck), the leader waits for it, and onstopped_leading is not called, however long
# that takes. Another candidate gets the lease meanwhile: both lead. The library in Go, which this one follows, cancels such a
# call at the deadline.
# Here, one leader's call gets no answer; lease_duration is 4 s, renew_deadline 3 s.
# Seen: "before: a; twice the lease after the call: a b; stopped: none".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check kubernetes==37.0.1
cat >"$work/run.py" <<'END'
import http.server
import json
import threading
import time

from kubernetes import client
from kubernetes.leaderelection import electionconfig, leaderelection
from kubernetes.leaderelection.resourcelock.leaselock import LeaseLock

LEASE, DEADLINE = 4, 3
lease = None
silent, unanswered, end = threading.Event(), threading.Event(), threading.Event()


class Cluster(http.server.BaseHTTPRequestHandler):
    """A server with one lease. When it is silent, it answers all but the candidate a."""

    def do_GET(self):
        if self.headers["X-Candidate"] == "a" and silent.is_set():
            unanswered.set()
            end.wait()
        self.answer(200 if lease else 404, lease or {"code": 404})

    def do_POST(self):
        self.store("0")

    def do_PUT(self):
        self.store(lease["metadata"]["resourceVersion"])

    def store(self, version):
        global lease
        value = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if value["metadata"].get("resourceVersion", "0") != version:
            return self.answer(409, {"code": 409})
        value["metadata"]["resourceVersion"] = str(int(version) + 1)
        lease = value
        self.answer(200, value)

    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


class Candidate:
    def __init__(self, name):
        self.name, self.started, self.stopped = name, threading.Event(), threading.Event()
        lock = LeaseLock("lock", "default", name)
        configuration = client.Configuration(host=f"http://127.0.0.1:{server.server_port}")
        lock.api_instance = client.CoordinationV1Api(client.ApiClient(configuration, "X-Candidate", name))
        config = electionconfig.Config(lock, LEASE, DEADLINE, 1, self.lead, self.stopped.set)
        threading.Thread(target=leaderelection.LeaderElection(config).run, daemon=True).start()

    def lead(self):
        self.started.set()
        end.wait()


def names(candidates):
    return " ".join(candidate.name for candidate in candidates) or "none"


def leaders():
    return names(one for one in both if one.started.is_set() and not one.stopped.is_set())


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cluster)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
both = [Candidate("a")]
assert both[0].started.wait(60)
both.append(Candidate("b"))
before = leaders()
silent.set()
assert unanswered.wait(60)
time.sleep(2 * LEASE)
both[1].started.wait(60)
stopped = names(one for one in both if one.stopped.is_set())
print(f"before: {before}; twice the lease after the call: {leaders()}; stopped: {stopped}")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qxF 'before: a; twice the lease after the call: a b; stopped: none' "$work/seen"
