#!/bin/sh
# kazoo 2.11.0 (PyPI) with Apache ZooKeeper 3.9.5 (Maven), standalone: entries of the recipe Queue have a priority, and the
# lowest number is documented to be served first. A consumer lists the entries once, and then serves all names of that
# list before it lists again: an urgent entry that is put meanwhile comes after all that were waiting before, however
# many there are. LockingQueue, with the same put(), serves it next.
# Seen: "Queue: a b c urgent; LockingQueue: a urgent b c".
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

from kazoo.client import KazooClient

client, other = (KazooClient(hosts=f"127.0.0.1:{sys.argv[1]}") for _ in range(2))
client.start(timeout=60)
other.start(timeout=60)


def queue_order():
    consumer = client.Queue("/queue")
    producer = other.Queue("/queue")
    for name in (b"a", b"b", b"c"):
        producer.put(name)
    order = [consumer.get()]
    producer.put(b"urgent", priority=1)
    return b" ".join(order + [consumer.get() for _ in range(3)]).decode()


def locking_order():
    consumer = client.LockingQueue("/locking")
    producer = other.LockingQueue("/locking")
    for name in (b"a", b"b", b"c"):
        producer.put(name)
    order = []
    for number in range(4):
        order.append(consumer.get(timeout=30))
        consumer.consume()
        if not number:
            producer.put(b"urgent", priority=1)
    return b" ".join(order).decode()


print(f"Queue: {queue_order()}; LockingQueue: {locking_order()}")
for each in (client, other):
    each.stop()
    each.close()
END
"$work/venv/bin/python" "$work/run.py" "$port" 2>/dev/null | tee "$work/seen"
grep -qx 'Queue: a b c urgent; LockingQueue: a urgent b c' "$work/seen"
