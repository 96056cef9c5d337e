#!/bin/sh
# kazoo 2.11.0 (PyPI) with Apache ZooKeeper 3.9.5 (Maven), standalone: acquire(timeout=3) of a lock is documented to raise
# LockTimeout if the lock was not acquired within 3 s. It waits 3 s for the contender before it, and again 3 s each time
# that one before it gives up, so that the contenders with timeouts make each other late. The message names 3 s all the
# same. Here, four programs wait for a lock that is not released: the last one, with 3 s, sees those before it give up
# after 2, 4 and 6 s.
# Seen: "acquire(timeout=6, 4, 2, 3): LockTimeout after 6, 4, 2, 9 s; the last: Failed to acquire lock on /lock after 3
# seconds" (on one line).
set -eu
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" || :; wait; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check kazoo==2.11.0
cat >"$work/pom.xml" <<'END'
<project>
  <modelVersion>4.0.0</modelVersion><groupId>x</groupId><artifactId>x</artifactId><version>1</version>
  <dependencies><dependency>
    <groupId>org.apache.zookeeper</groupId><artifactId>zookeeper</artifactId><version>3.9.5</version>
  </dependency><dependency>
    <groupId>io.dropwizard.metrics</groupId><artifactId>metrics-core</artifactId><version>4.2.28</version>
  </dependency><dependency>
    <groupId>org.xerial.snappy</groupId><artifactId>snappy-java</artifactId><version>1.1.10.7</version>
  </dependency></dependencies>
</project>
END
mvn -q -Dmaven.repo.local="$work/m2" -f "$work/pom.xml" dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory="$work/jars" >/dev/null
mkdir "$work/data"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
printf 'dataDir=%s\nclientPort=%s\nclientPortAddress=127.0.0.1\nadmin.enableServer=false\n' "$work/data" "$port" >"$work/zoo.cfg"
java -cp "$work/jars/*" org.apache.zookeeper.server.quorum.QuorumPeerMain "$work/zoo.cfg" >"$work/log" 2>&1 &
server=$!
cat >"$work/run.py" <<'END'
import sys
import threading
import time

from kazoo.client import KazooClient
from kazoo.exceptions import LockTimeout

TIMEOUTS = (6, 4, 2, 3)
clients = []
for _ in range(5):
    client = KazooClient(hosts=f"127.0.0.1:{sys.argv[1]}")
    client.start(timeout=60)
    clients.append(client)
holder = clients.pop().Lock("/lock")
seen = {}


def wait(client, timeout):
    start = time.monotonic()
    try:
        client.Lock("/lock").acquire(timeout=timeout)
        seen[timeout] = "acquired"
    except LockTimeout as error:
        seen[timeout] = (round(time.monotonic() - start), str(error))


with holder:
    threads = []
    for client, timeout in zip(clients, TIMEOUTS, strict=True):
        thread = threading.Thread(target=wait, args=(client, timeout))
        thread.start()
        threads.append(thread)
        # The next one queues up behind it.
        while len(client.get_children("/lock")) < 1 + len(threads):
            time.sleep(0.01)
    for thread in threads:
        thread.join()
after = ", ".join(str(seen[timeout][0]) for timeout in TIMEOUTS)
numbers = ", ".join(map(str, TIMEOUTS))
print(f"acquire(timeout={numbers}): LockTimeout after {after} s; the last: {seen[3][1]}")
for client in clients:
    client.stop()
    client.close()
END
"$work/venv/bin/python" "$work/run.py" "$port" 2>"$work/err" | tee "$work/seen"
first='acquire(timeout=6, 4, 2, 3): LockTimeout after 6, 4, 2, 9 s'
grep -qxF "$first; the last: Failed to acquire lock on /lock after 3 seconds" "$work/seen"
