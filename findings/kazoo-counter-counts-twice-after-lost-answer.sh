#!/bin/sh
# kazoo 2.11.0 (PyPI) with Apache ZooKeeper 3.9.5 (Maven), standalone: a Counter changes its value by compare-and-set, so
# that each change should count once. If the connection is lost after the server has set the value and before its answer
# has arrived, the change is repeated on the new value, and counts twice, without an error; pre_value hides that. The only
# error that the documentation names is BadVersionError, for a change that was not applied.
# Seen: "1, then += 1 with the answer lost: 3 (pre_value 2, post_value 3), set 2 times".
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
import socket
import struct
import sys
import threading

from kazoo.client import KazooClient

SET_DATA = 5
cut = threading.Event()


def packets(stream):
    """Yield the packets of a connection."""
    while True:
        size = stream.read(4)
        if len(size) < 4:
            return
        yield size + stream.read(struct.unpack(">i", size)[0])


def forward(source, sink, state, requests):
    """Pass packets on; once, when told, end the connection instead of passing the answer to a change."""
    try:
        for packet in packets(source.makefile("rb")):
            # A request begins with its number and its type, an answer with the number.
            number = packet[4:8]
            if requests and "connected" in state:
                if cut.is_set() and struct.unpack(">i", packet[8:12])[0] == SET_DATA:
                    cut.clear()
                    state["lost"] = number
            elif requests:
                state["connected"] = True
            elif number == state.get("lost"):
                break
            sink.sendall(packet)
    except OSError:
        pass
    for connection in (source, sink):
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def serve():
    while True:
        client, _ = listener.accept()
        try:
            server = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
        except OSError:
            # It does not listen yet, and the client repeats its attempt.
            client.close()
            continue
        state = {}
        threading.Thread(target=forward, args=(client, server, state, True), daemon=True).start()
        threading.Thread(target=forward, args=(server, client, state, False), daemon=True).start()


listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=serve, daemon=True).start()
client = KazooClient(hosts=f"127.0.0.1:{listener.getsockname()[1]}")
client.start(timeout=60)
counter = client.Counter("/counter")
counter += 1
first, version = counter.value, client.get("/counter")[1].version
cut.set()
counter += 1
second, times = counter.value, client.get("/counter")[1].version - version
values = f"pre_value {counter.pre_value}, post_value {counter.post_value}"
print(f"{first}, then += 1 with the answer lost: {second} ({values}), set {times} times")
client.stop()
client.close()
END
"$work/venv/bin/python" "$work/run.py" "$port" 2>"$work/err" | tee "$work/seen" || { cat "$work/err"; exit 1; }
grep -qxF '1, then += 1 with the answer lost: 3 (pre_value 2, post_value 3), set 2 times' "$work/seen"
