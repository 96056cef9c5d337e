#!/bin/sh
# Apache ZooKeeper 3.9.5 (Maven Central), one member of three without the others: the AdminServer answers the commands of a
# server that does not serve with status 200, and so does an unknown command; that it does not serve is in the field
# "error" of the body. A probe of a load balancer or of Kubernetes that goes by the status takes the server for healthy.
# "ruok", which answers "imok" by a four-letter word then, has that error here. The one command with another status is
# "monitor", the source of metrics: 500, for a NullPointerException.
# Seen: "port for clients: ruok: imok, srvr: not serving; AdminServer: ruok 200 (not serving), server_stats 200 (not
# serving), leader 200 (not serving), no_such_command 200 (unknown), monitor 500 (NullPointerException)" (on one line).
set -eu
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" || :; wait; rm -rf "$work"' EXIT
cat >"$work/pom.xml" <<'END'
<project>
  <modelVersion>4.0.0</modelVersion><groupId>x</groupId><artifactId>x</artifactId><version>1</version>
  <dependencies><dependency>
    <groupId>org.apache.zookeeper</groupId><artifactId>zookeeper</artifactId><version>3.9.5</version>
  </dependency><dependency>
    <groupId>io.dropwizard.metrics</groupId><artifactId>metrics-core</artifactId><version>4.2.28</version>
  </dependency><dependency>
    <groupId>org.xerial.snappy</groupId><artifactId>snappy-java</artifactId><version>1.1.10.7</version>
  </dependency><dependency>
    <groupId>org.eclipse.jetty</groupId><artifactId>jetty-servlet</artifactId><version>9.4.57.v20241219</version>
  </dependency><dependency>
    <groupId>com.fasterxml.jackson.core</groupId><artifactId>jackson-databind</artifactId><version>2.18.2</version>
  </dependency></dependencies>
</project>
END
mvn -q -Dmaven.repo.local="$work/m2" -f "$work/pom.xml" dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory="$work/jars" >/dev/null
port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}
client=$(port) admin=$(port)
mkdir "$work/data"
echo 1 >"$work/data/myid"
cat >"$work/zoo.cfg" <<END
dataDir=$work/data
clientPort=$client
clientPortAddress=127.0.0.1
admin.serverPort=$admin
admin.serverAddress=127.0.0.1
tickTime=1000
initLimit=10
syncLimit=5
4lw.commands.whitelist=ruok,srvr
server.1=127.0.0.1:$(port):$(port)
server.2=127.0.0.1:$(port):$(port)
server.3=127.0.0.1:$(port):$(port)
END
java -cp "$work/jars/*" org.apache.zookeeper.server.quorum.QuorumPeerMain "$work/zoo.cfg" >"$work/log" 2>&1 &
server=$!
cat >"$work/run.py" <<'END'
import socket
import sys
import time
import urllib.error
import urllib.request

TEXTS = {
    "not currently serving": "not serving",
    "Unknown command": "unknown",
    "NullPointerException": "NullPointerException",
}


def short(text):
    return next((name for part, name in TEXTS.items() if part in text), text.strip())


def word(name):
    with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=10) as connection:
        connection.sendall(name.encode())
        return short(connection.recv(1000).decode())


def command(name):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[2]}/commands/{name}", timeout=10) as answer:
            return f"{name} {answer.status} ({short(answer.read().decode())})"
    except urllib.error.HTTPError as error:
        return f"{name} {error.code} ({short(error.read().decode())})"


end = time.monotonic() + 60
while True:
    try:
        words = f"port for clients: ruok: {word('ruok')}, srvr: {word('srvr')}"
        commands = ("ruok", "server_stats", "leader", "no_such_command", "monitor")
        print(f"{words}; AdminServer: {', '.join(map(command, commands))}")
        break
    except OSError:
        assert time.monotonic() < end
        time.sleep(0.2)
END
python3 "$work/run.py" "$client" "$admin" | tee "$work/seen"
first='port for clients: ruok: imok, srvr: not serving; AdminServer: ruok 200 (not serving), server_stats 200 (not serving)'
second='leader 200 (not serving), no_such_command 200 (unknown), monitor 500 (NullPointerException)'
grep -qxF "$first, $second" "$work/seen"
