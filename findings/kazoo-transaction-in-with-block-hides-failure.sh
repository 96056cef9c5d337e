#!/bin/sh
# kazoo 2.11.0 (PyPI) with Apache ZooKeeper 3.9.5 (Maven), standalone: "with client.transaction() as transaction" commits
# at the end of the block, and discards the results. Errors of a transaction are results, not exceptions: a block whose
# check has failed ends like one that has succeeded, and nothing was written. Outside of a block, commit() returns the
# errors. The recipe LockingQueue is built on such blocks: where its put() raises NoAuthError, put_all(), which is
# documented to succeed only if it has put everything, returns as usual and has put nothing.
# Seen: "commit: BadVersionError RuntimeInconsistency; block: no error, nothing created; put: NoAuthError; put_all: no
# error, 0 entries" (on one line).
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
from kazoo.security import OPEN_ACL_UNSAFE, READ_ACL_UNSAFE

client = KazooClient(hosts=f"127.0.0.1:{sys.argv[1]}")
client.start(timeout=60)
client.create("/record", b"old")
client.set("/record", b"new")


def outcome(function):
    try:
        function()
        return "no error"
    except Exception as error:
        return type(error).__name__


def block():
    with client.transaction() as transaction:
        transaction.check("/record", version=0)
        transaction.create("/claim")


transaction = client.transaction()
transaction.check("/record", version=0)
transaction.create("/claim")
results = " ".join(type(result).__name__ for result in transaction.commit())
in_block = outcome(block)
created = "created" if client.exists("/claim") else "nothing created"
# A queue whose entries this client may only read.
client.create("/queue", acl=OPEN_ACL_UNSAFE)
client.create("/queue/taken", acl=OPEN_ACL_UNSAFE)
client.create("/queue/entries", acl=READ_ACL_UNSAFE)
queue = client.LockingQueue("/queue")
put = outcome(lambda: queue.put(b"job"))
put_all = outcome(lambda: queue.put_all([b"job", b"job"]))
print(f"commit: {results}; block: {in_block}, {created}; put: {put}; put_all: {put_all}, {len(queue)} entries")
client.stop()
client.close()
END
"$work/venv/bin/python" "$work/run.py" "$port" 2>/dev/null | tee "$work/seen"
grep -qx 'commit: BadVersionError RuntimeInconsistency; block: no error, nothing created; put: NoAuthError; put_all: no error, 0 entries' "$work/seen"
