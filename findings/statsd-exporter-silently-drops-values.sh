#!/bin/sh
# statsd_exporter 0.31.0 (Go module) with statsd 4.0.1 (PyPI): three things that statsd servers accept are lost, and the log
# says so at the level debug at most. decr() is dropped, since counters of Prometheus cannot decrease: a number that is kept
# by incr() and decr() only grows. Of a timer and a counter with one name, as Nodepool and Zuul send them for launches and
# builds, the type that comes second is dropped until the exporter is restarted. Names that differ only in "-", "_" and
# "." become one metric, with the last value that was sent for any of them.
# Seen: "3 incr() and 2 decr(): 3; timing() and 2 incr() of one name: 1 time, no counter; gauges a-b 1, a_b 5, a.b 7: a_b 7;
# lines of the log: 0" (on one line).
set -eu
work=$(mktemp -d)
exporter=
trap '[ -z "$exporter" ] || kill "$exporter" 2>/dev/null || :; wait; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check statsd==4.0.1
export GOPATH="$work/go" GOCACHE="$work/cache" GOBIN="$work" GOFLAGS=-modcacherw CGO_ENABLED=0
go install -ldflags=-w github.com/prometheus/statsd_exporter@v0.31.0 2>"$work/build"
port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}
web=$(port) udp=$(port) tcp=$(port)
"$work/statsd_exporter" --web.listen-address="127.0.0.1:$web" --statsd.listen-udp="127.0.0.1:$udp" \
    --statsd.listen-tcp="127.0.0.1:$tcp" >"$work/log" 2>&1 &
exporter=$!
cat >"$work/run.py" <<'END'
import sys
import time
import urllib.request

import statsd


def metrics():
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/metrics", timeout=5) as answer:
            lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    except OSError:
        return {}
    return dict(line.rsplit(" ", 1) for line in lines)


def wait(done):
    end = time.monotonic() + 30
    while not done(found := metrics()):
        assert time.monotonic() < end, found
        time.sleep(0.2)
    return found


wait(bool)
client = statsd.StatsClient("127.0.0.1", int(sys.argv[2]))
for _ in range(3):
    client.incr("builds")
for _ in range(2):
    client.decr("builds")
client.timing("launch.ready", 5000)
for _ in range(2):
    client.incr("launch.ready")
for name, value in (("a-b", 1), ("a_b", 5), ("a.b", 7)):
    client.gauge(name, value)
client.gauge("end", 1)
found = wait(lambda found: "end" in found)
with open(sys.argv[3]) as log:
    lines = [line for line in log if "level=INFO" not in line]
counter = f"counter {found['launch_ready']}" if "launch_ready" in found else "no counter"
print(
    f"3 incr() and 2 decr(): {found['builds']}; timing() and 2 incr() of one name: {found['launch_ready_count']} time, {counter}; "
    f"gauges a-b 1, a_b 5, a.b 7: a_b {found['a_b']}; lines of the log: {len(lines)}"
)
END
"$work/venv/bin/python" "$work/run.py" "$web" "$udp" "$work/log" | tee "$work/seen"
first='3 incr() and 2 decr(): 3; timing() and 2 incr() of one name: 1 time, no counter; gauges a-b 1, a_b 5, a.b 7: a_b 7'
grep -qxF "$first; lines of the log: 0" "$work/seen"
