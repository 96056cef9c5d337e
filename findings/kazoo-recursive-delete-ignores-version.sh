#!/bin/sh
# kazoo 2.11.0 (PyPI) with Apache ZooKeeper 3.9.5 (Maven), standalone: delete(path, version=N) refuses with BadVersionError if
# the znode has another version, but delete(path, version=N, recursive=True) deletes the znode and everything below it,
# whatever its version is; the argument is not used and not refused. Without the znode the first raises NoNodeError, the
# second returns True. The docstring names no difference.
# Seen: "version 7 of a znode with version 0: BadVersionError; recursive: deleted; then: NoNodeError; recursive: True".
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


def outcome(**options):
    try:
        return client.delete("/tree", version=7, **options)
    except Exception as error:
        return type(error).__name__


client = KazooClient(hosts=f"127.0.0.1:{sys.argv[1]}")
client.start(timeout=60)
client.create("/tree")
client.create("/tree/leaf")
plain = outcome()
outcome(recursive=True)
left = "there" if client.exists("/tree") else "deleted"
print(f"version 7 of a znode with version 0: {plain}; recursive: {left}; then: {outcome()}; recursive: {outcome(recursive=True)}")
client.stop()
client.close()
END
"$work/venv/bin/python" "$work/run.py" "$port" 2>/dev/null | tee "$work/seen"
grep -qx 'version 7 of a znode with version 0: BadVersionError; recursive: deleted; then: NoNodeError; recursive: True' "$work/seen"
