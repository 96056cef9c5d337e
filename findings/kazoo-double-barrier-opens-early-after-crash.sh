#!/bin/sh
# kazoo 2.11.0 (PyPI) with Apache ZooKeeper 3.9.5 (Maven), standalone: enter() of DoubleBarrier "blocks until all nodes have
# entered". The mark "ready" inside of it is a persistent node, and is counted as a participant. If the participants end
# without leave() (a crash, a lost host), it stays, and the next run opens one participant too early: of two, the first one
# enters alone, although the other one has not started. enter() also returns without an error if it has failed (here: it
# may not create its node): only "participating", an attribute that the reference does not name, is False.
# Seen: "first run: a alone waits, with b entered; left: ready; next run: c alone entered; refused: no error, participating
# False" (on one line).
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

from kazoo.client import KazooClient
from kazoo.security import make_acl


def client():
    found = KazooClient(hosts=sys.argv[1])
    found.start(timeout=60)
    return found


def enters(barrier, seconds):
    """Return whether the barrier lets its participant in within the time, and the thread that enters."""
    thread = threading.Thread(target=barrier.enter, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive(), thread


one, two, three = client(), client(), client()
alone, thread = enters(one.DoubleBarrier("/run", 2), 2)
first = f"a alone {'entered' if alone else 'waits'}"
two.DoubleBarrier("/run", 2).enter()
thread.join(60)
first += f", with b {'waits' if thread.is_alive() else 'entered'}"
# Both sessions end, as after a crash.
one.stop()
two.stop()
left = " ".join(three.get_children("/run"))
alone, _ = enters(three.DoubleBarrier("/run", 2), 60)
three.create("/refused", acl=[make_acl("world", "anyone", read=True, delete=True)])
barrier = three.DoubleBarrier("/refused", 2)
barrier.enter()
print(
    f"first run: {first}; left: {left}; next run: c alone {'entered' if alone else 'waits'}; "
    f"refused: no error, participating {barrier.participating}"
)
END
"$work/venv/bin/python" "$work/run.py" "127.0.0.1:$port" 2>"$work/errors" | tee "$work/seen"
seen='first run: a alone waits, with b entered; left: ready; next run: c alone entered; refused: no error, participating False'
grep -qxF "$seen" "$work/seen"
