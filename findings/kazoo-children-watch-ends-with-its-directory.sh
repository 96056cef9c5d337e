#!/bin/sh
# kazoo 2.11.0 (PyPI) with Apache ZooKeeper 3.9.5 (Maven), standalone: a ChildrenWatch ends for good when its directory is
# deleted, silently: its function is not called, and not again when the directory has been created anew. (If that happens
# before the watch has seen the deletion, it goes on.) A DataWatch on the same path reports both. The documentation says only
# that the path "must already exist for the children watcher to run". A program that watches a directory of members which
# another one cleans up and creates again sees none of the new members.
# Seen: "children watch: [], [a], []; data watch: exists, deleted, exists; members by then: b, c".
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
import queue
import sys

from kazoo.client import KazooClient

WAIT = 30  # seconds, for one event
by_children, by_data = queue.Queue(), queue.Queue()
watcher = KazooClient(hosts=f"127.0.0.1:{sys.argv[1]}")
watcher.start(timeout=60)
other = KazooClient(hosts=f"127.0.0.1:{sys.argv[1]}")
other.start(timeout=60)


def texts(events):
    return f"[{', '.join(sorted(events))}]"


def settle():
    """Wait until kazoo has called the functions for all events so far: it does so in order, in one thread."""
    later = queue.Queue()
    path = other.create("/later", sequence=True) + "x"
    watcher.DataWatch(path, lambda data, stat: later.put(stat))
    assert later.get(timeout=WAIT) is None
    other.create(path)
    assert later.get(timeout=WAIT) is not None


other.create("/members")
watcher.ChildrenWatch("/members", lambda children: by_children.put(texts(children)))
watcher.DataWatch("/members", lambda data, stat: by_data.put("exists" if stat else "deleted"))
children, data = [by_children.get(timeout=WAIT)], [by_data.get(timeout=WAIT)]
other.create("/members/a")
children.append(by_children.get(timeout=WAIT))
other.delete("/members/a")
children.append(by_children.get(timeout=WAIT))
other.delete("/members")
data.append(by_data.get(timeout=WAIT))
settle()
other.create("/members")
data.append(by_data.get(timeout=WAIT))
for name in "bc":
    other.create(f"/members/{name}")
settle()
while not by_children.empty():
    children.append(by_children.get())
members = ", ".join(sorted(other.get_children("/members")))
print(f"children watch: {', '.join(children)}; data watch: {', '.join(data)}; members by then: {members}")
for client in (watcher, other):
    client.stop()
    client.close()
END
"$work/venv/bin/python" "$work/run.py" "$port" | tee "$work/seen"
grep -qxF 'children watch: [], [a], []; data watch: exists, deleted, exists; members by then: b, c' "$work/seen"
