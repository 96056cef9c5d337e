#!/bin/sh
# kazoo 2.11.0 (PyPI) with Apache ZooKeeper 3.9.5 (Maven), standalone: MultiNonBlockingLease lets at most a given number of
# hosts run a task, and is renewed by creating it again with the same identifier. It tries the places in their order, and
# does not search for its own one first: a host in the second place that renews after the first became free takes the
# first in addition. Its old entry holds until it expires, and meanwhile another host is refused although one host uses
# both places.
# Seen: "one and two start, one is gone: two renews: True; three of two places: False; holders: two two; when the old
# entry of two has expired: three: True" (on one line).
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
import datetime
import json
import sys

from kazoo.client import KazooClient

START = datetime.datetime(2026, 11, 2, 8, 0)
client = KazooClient(hosts=f"127.0.0.1:{sys.argv[1]}")
client.start(timeout=60)


def lease(host, minutes):
    """Create or renew a lease of 60 minutes on one of two places, so many minutes after the start."""
    now = START + datetime.timedelta(minutes=minutes)
    hour = datetime.timedelta(minutes=60)
    return bool(client.MultiNonBlockingLease(2, "/places", hour, identifier=host, utcnow=lambda: now))


assert lease("one", 0) and lease("two", 30) and not lease("three", 31)
# The lease of "one" has ended after 60 minutes.
renewed = lease("two", 70)
refused = lease("three", 71)
holders = " ".join(json.loads(client.get(f"/places/{place}/lease_holder")[0])["holder"] for place in range(2))
later = lease("three", 91)
print(
    f"one and two start, one is gone: two renews: {renewed}; three of two places: {refused}; holders: {holders}; "
    f"when the old entry of two has expired: three: {later}"
)
client.stop()
client.close()
END
"$work/venv/bin/python" "$work/run.py" "$port" 2>/dev/null | tee "$work/seen"
grep -qx 'one and two start, one is gone: two renews: True; three of two places: False; holders: two two; when the old entry of two has expired: three: True' "$work/seen"
