#!/bin/sh
# aiozk 0.32.0 (PyPI) with Apache ZooKeeper 3.9.5 (Maven), standalone: recipes.Lease, whose limit is 1 unless it is given,
# counts the leases and then creates its own, without a check in between: of clients that ask at the same time, as after a
# restart of all, each gets the lease. kazoo's NonBlockingLease, for the same purpose, gives it to one of them. Clients that
# ask later get none, so that tests pass, but a clean-up that must run once can run on all hosts.
# Seen: "aiozk: 5 of 5 clients have the lease, then 0 of 5 get it; kazoo: 1 of 5".
set -eu
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" || :; wait; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check aiozk==0.32.0 kazoo==2.11.0
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
import asyncio
import concurrent.futures
import datetime
import sys
import threading

import aiozk
from kazoo.client import KazooClient

COUNT = 5
HOUR = datetime.timedelta(hours=1)
barrier = threading.Barrier(COUNT)


def by_kazoo(client):
    barrier.wait()
    return bool(client.NonBlockingLease("/kazoo", HOUR, identifier=str(id(client))))


async def by_aiozk():
    clients = [aiozk.ZKClient(sys.argv[1]) for _ in range(COUNT)]
    for client in clients:
        await client.start()
    await clients[0].ensure_path("/aiozk")

    async def ask():
        leases = [client.recipes.Lease("/aiozk") for client in clients]
        return sum(await asyncio.gather(*(lease.obtain(HOUR) for lease in leases)))

    result = f"{await ask()} of {COUNT} clients have the lease, then {await ask()} of {COUNT} get it"
    for client in clients:
        await client.close()
    return result


clients = [KazooClient(hosts=sys.argv[1]) for _ in range(COUNT)]
for client in clients:
    client.start(timeout=60)
first = asyncio.run(by_aiozk())
with concurrent.futures.ThreadPoolExecutor(COUNT) as pool:
    second = sum(pool.map(by_kazoo, clients))
print(f"aiozk: {first}; kazoo: {second} of {COUNT}")
for client in clients:
    client.stop()
    client.close()
END
"$work/venv/bin/python" "$work/run.py" "127.0.0.1:$port" 2>"$work/err" | tee "$work/seen" || tail "$work/err"
grep -qx 'aiozk: 5 of 5 clients have the lease, then 0 of 5 get it; kazoo: 1 of 5' "$work/seen"
