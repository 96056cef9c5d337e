#!/bin/sh
# kazoo 2.11.0 (PyPI) and github.com/go-zookeeper/zk 1.0.4 (Go module) with Apache ZooKeeper 3.9.5 (Maven), standalone: on
# one path, the lock of the Go client waits for the lock of kazoo, and parses its names. kazoo counts names with "__lock__"
# only, and takes a lock that the Go client holds ("_c_...-lock-..."), blocking or not: both hold it. Whether a test with
# both shows that depends on which one comes first. With extra_lock_patterns=["-lock-"], which is optional, kazoo waits.
# Seen: "kazoo first: Go waits; Go first: kazoo locked, both hold it; Go first, kazoo with the pattern: kazoo waits".
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
export GOPATH="$work/go" GOCACHE="$work/cache" GOFLAGS=-modcacherw CGO_ENABLED=0
mkdir "$work/lock" "$work/data"
cat >"$work/lock/main.go" <<'END'
package main

import (
	"fmt"
	"os"
	"time"

	"github.com/go-zookeeper/zk"
)

type quiet struct{}

func (quiet) Printf(string, ...interface{}) {}

// Report whether the lock at a path is free, and hold it or wait for it until standard input is closed.
func main() {
	client, _, err := zk.Connect([]string{os.Args[1]}, 10*time.Second, zk.WithLogger(quiet{}))
	if err != nil {
		panic(err)
	}
	locked := make(chan error, 1)
	go func() { locked <- zk.NewLock(client, os.Args[2], zk.WorldACL(zk.PermAll)).Lock() }()
	select {
	case err := <-locked:
		fmt.Println("locked", err)
	case <-time.After(5 * time.Second):
		fmt.Println("waits")
	}
	os.Stdin.Read(make([]byte, 1))
}
END
cd "$work/lock"
go mod init lock 2>/dev/null
go get github.com/go-zookeeper/zk@v1.0.4 2>"$work/build"
go build -gcflags='all=-N -l' -ldflags='-s -w' -o lock .
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
printf 'dataDir=%s\nclientPort=%s\nclientPortAddress=127.0.0.1\nadmin.enableServer=false\n' "$work/data" "$port" >"$work/zoo.cfg"
java -cp "$work/jars/*" org.apache.zookeeper.server.quorum.QuorumPeerMain "$work/zoo.cfg" >"$work/log" 2>&1 &
server=$!
cat >"$work/run.py" <<'END'
import subprocess
import sys

from kazoo.client import KazooClient

client = KazooClient(hosts=sys.argv[1])
client.start(timeout=60)


def other(path):
    process = subprocess.Popen(["./lock", sys.argv[1], path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


with client.Lock("/one"):
    process, one = other("/one")
    process.kill()
    process.wait()
client.ensure_path("/two")
process, two = other("/two")
assert two == "locked <nil>", two
lock = client.Lock("/two")
locked = "locked, both hold it" if lock.acquire(blocking=False) and process.poll() is None else "waits"
lock.release()
patterns = "locked" if client.Lock("/two", extra_lock_patterns=["-lock-"]).acquire(blocking=False) else "waits"
process.kill()
process.wait()
print(f"kazoo first: Go {one}; Go first: kazoo {locked}; Go first, kazoo with the pattern: kazoo {patterns}")
client.stop()
client.close()
END
"$work/venv/bin/python" "$work/run.py" "127.0.0.1:$port" 2>"$work/err" | tee "$work/seen"
grep -qx 'kazoo first: Go waits; Go first: kazoo locked, both hold it; Go first, kazoo with the pattern: kazoo waits' "$work/seen"
