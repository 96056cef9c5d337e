#!/bin/sh
# zake 0.2.2 and kazoo 2.11.0 (PyPI) with Apache ZooKeeper 3.9.5 (Maven), standalone: zake has a client for tests, which
# behaves like kazoo's without a server. A transaction whose check fails has the same results with both, among them
# RolledBackError, but zake does not roll back: what stands before the failed operation is applied. A test that nothing is
# changed if another launcher was faster fails although the code is right.
# Seen: "ZooKeeper: RolledBackError BadVersionError RuntimeInconsistency, /node has old; zake: RolledBackError BadVersionError
# RuntimeInconsistency, /node has new" (on one line).
set -eu
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" || :; wait; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check kazoo==2.11.0 zake==0.2.2
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
from zake.fake_client import FakeClient

seen = []
for name, client in (("ZooKeeper", KazooClient(hosts=sys.argv[1])), ("zake", FakeClient())):
    client.start(timeout=60)
    client.create("/node", b"old")
    client.create("/lock", b"")
    transaction = client.transaction()
    transaction.set_data("/node", b"new")
    transaction.check("/lock", 99)
    transaction.create("/later")
    results = " ".join(type(each).__name__ for each in transaction.commit())
    assert not client.exists("/later")
    seen.append(f"{name}: {results}, /node has {client.get('/node')[0].decode()}")
    client.stop()
    client.close()
print("; ".join(seen))
END
"$work/venv/bin/python" "$work/run.py" "127.0.0.1:$port" 2>"$work/err" | tee "$work/seen"
results='RolledBackError BadVersionError RuntimeInconsistency'
grep -qx "ZooKeeper: $results, /node has old; zake: $results, /node has new" "$work/seen"
