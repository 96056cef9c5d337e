#!/bin/sh
# tooz 9.1.0 with kazoo 2.11.0 (PyPI) and Apache ZooKeeper 3.9.5 (Maven), standalone: when the session of a coordinator ends (a
# pause longer than its timeout), the client gets another session, and heartbeat() and run_watchers() go on without an error.
# The memberships are gone, and the lock that stands for the leader is gone, too, but its object says that it is acquired:
# run_watchers() does not take part in elections any more. With one member, the group has no leader from then on; with
# several, each that has lost its session as the leader is never elected again. A lock of get_lock() says that it is acquired
# while another coordinator has it.
# Seen: "before: members a, leader a; after: members none, leader None, elected once; lock: a acquired, b acquired".
set -eu
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" || :; wait; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check tooz==9.1.0 kazoo==2.11.0
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
import time

from kazoo.client import KazooClient
from tooz import coordination

GROUP = b"launchers"


def coordinator(name):
    found = coordination.get_coordinator(f"zookeeper://{sys.argv[1]}?timeout=60", name)
    found.start()
    return found


def state():
    # The node of the lock is listed as a member.
    members = sorted(name.decode() for name in one.get_members(GROUP).get() if name != b"leader")
    leader = one.get_leader(GROUP).get()
    return f"members {' '.join(members) or 'none'}, leader {leader and leader.decode()}"


one = coordinator(b"a")
one.create_group(GROUP).get()
one.join_group(GROUP).get()
elections = []
one.watch_elected_as_leader(GROUP, elections.append)
lock = one.get_lock(b"image")
lock.acquire()
one.run_watchers()
before = state()
# The session ends, as after a pause: another client adopts it, and closes it.
session = one._coord.client_id
other = KazooClient(hosts=sys.argv[1], client_id=session)
other.start(timeout=60)
other.stop()
other.close()
end = time.monotonic() + 60
while one._coord.client_id == session or not one._coord.connected:
    assert time.monotonic() < end
    time.sleep(0.1)
for _ in range(5):
    one.heartbeat()
    one.run_watchers()
after = f"{state()}, elected {'once' if len(elections) == 1 else len(elections)}"
two = coordinator(b"b")
second = two.get_lock(b"image")
second.acquire(blocking=False)
owners = ", ".join(f"{name} acquired" for name, each in (("a", lock), ("b", second)) if each.acquired)
print(f"before: {before}; after: {after}; lock: {owners}")
two.stop()
END
"$work/venv/bin/python" "$work/run.py" "127.0.0.1:$port" 2>"$work/errors" | tee "$work/seen"
grep -qxF 'before: members a, leader a; after: members none, leader None, elected once; lock: a acquired, b acquired' "$work/seen"
