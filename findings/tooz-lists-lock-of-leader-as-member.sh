#!/bin/sh
# tooz 9.1.0 with kazoo 2.11.0 (PyPI) and Apache ZooKeeper 3.9.5 (Maven), standalone: as soon as a program watches who is elected
# as the leader of a group, the group has one more member, named "leader": the lock is stored among the members. get_members()
# lists it, callbacks of watch_join_group() are called for it, and a quorum or a hash ring counts it. In a partitioned group,
# run_watchers() raises SerializationError.
# Seen: "members: a; with an election: a leader; joined: leader; partitioned group: SerializationError".
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

from tooz import coordination


def members(group):
    return " ".join(sorted(name.decode() for name in one.get_members(group).get()))


one = coordination.get_coordinator(f"zookeeper://{sys.argv[1]}?timeout=60", b"a")
one.start()
one.create_group(b"plain").get()
one.join_group(b"plain").get()
before, joined = members(b"plain"), []
one.watch_join_group(b"plain", lambda event: joined.append(event.member_id.decode()))
one.watch_elected_as_leader(b"plain", lambda event: None)
for _ in range(2):
    one.run_watchers()
after = members(b"plain")
partitioner = one.join_partitioned_group(b"shared")
one.watch_elected_as_leader(b"shared", lambda event: None)
try:
    for _ in range(2):
        one.run_watchers()
    result = "no error"
except Exception as problem:
    result = type(problem).__name__
print(f"members: {before}; with an election: {after}; joined: {' '.join(joined) or 'none'}; partitioned group: {result}")
one.stop()
END
"$work/venv/bin/python" "$work/run.py" "127.0.0.1:$port" 2>"$work/errors" | tee "$work/seen"
grep -qxF 'members: a; with an election: a leader; joined: leader; partitioned group: SerializationError' "$work/seen"
