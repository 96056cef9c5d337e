#!/bin/sh
# docker-registry 2.8.2 (Debian; the registry of github.com/distribution/distribution): "garbage-collect --delete-untagged"
# is documented to "delete manifests that are not currently referenced via tag". The manifests of an image for several
# architectures are referenced by the list that the tag names, and it deletes them: the tag and its list remain, and each
# pull of any architecture fails. Without the option they are kept. The registry of a CI system, cleaned at night, loses all
# images for several architectures, with status 0, and listings of repositories and tags still have them.
# Seen: "before: tag 200, manifests 200 200; garbage-collect: tag 200, manifests 200 200; garbage-collect --delete-untagged:
# tag 200, manifests 404 404, tags latest" (on one line).
set -eu
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" || :; wait; rm -rf "$work"' EXIT
cd "$work"
(apt-get -q download docker-registry=2.8.2+ds1-1 && dpkg-deb -x docker-registry_*.deb root) >log 2>&1 || { cat log; exit 1; }
root/usr/bin/docker-registry --version
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
cat >config.yml <<END
version: 0.1
storage: {filesystem: {rootdirectory: $work/data}, delete: {enabled: true}}
http: {addr: "127.0.0.1:$port"}
END
cat >run.py <<'END'
import hashlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

ONE = "application/vnd.docker.distribution.manifest.v2+json"
LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
base = f"http://127.0.0.1:{sys.argv[1]}/v2/image"


def digest(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


def call(method, url, data=None, **headers):
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer
    except urllib.error.HTTPError as error:
        return error.code, error


def push_manifest(name, kind, **content):
    data = json.dumps({"schemaVersion": 2, "mediaType": kind, **content}).encode()
    status, _ = call("PUT", f"{base}/manifests/{name or digest(data)}", data, **{"Content-Type": kind})
    assert status == 201, status
    return {"mediaType": kind, "digest": digest(data), "size": len(data)}


def push_image(architecture):
    data = json.dumps({"architecture": architecture, "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}}).encode()
    url = call("POST", f"{base}/blobs/uploads/", b"")[1].headers["Location"]
    status, _ = call("PUT", f"{url}&digest={digest(data)}", data, **{"Content-Type": "application/octet-stream"})
    assert status == 201, status
    config = {"mediaType": "application/vnd.docker.container.image.v1+json", "digest": digest(data), "size": len(data)}
    manifest = push_manifest(None, ONE, config=config, layers=[])
    return {**manifest, "platform": {"architecture": architecture, "os": "linux"}}


def state():
    tag, _ = call("GET", f"{base}/manifests/latest", Accept=LIST)
    each = [str(call("GET", f"{base}/manifests/{one['digest']}", Accept=ONE)[0]) for one in images]
    return f"tag {tag}, manifests {' '.join(each)}"


def collect(*options):
    words = ["root/usr/bin/docker-registry", "garbage-collect", *options, "config.yml"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return f"{' '.join(words[1:-1])}: {state()}"


for _ in range(100):
    try:
        call("GET", base)
        break
    except urllib.error.URLError:
        time.sleep(0.2)
images = [push_image(each) for each in ("amd64", "arm64")]
push_manifest("latest", LIST, manifests=images)
seen = [f"before: {state()}", collect(), collect("--delete-untagged")]
with urllib.request.urlopen(f"{base}/tags/list", timeout=20) as answer:
    print("; ".join(seen) + f", tags {' '.join(json.load(answer)['tags'])}")
END
root/usr/bin/docker-registry serve config.yml >log 2>&1 &
server=$!
python3 run.py "$port" | tee seen
kept='tag 200, manifests 200 200'
gone='tag 200, manifests 404 404, tags latest'
grep -qx "before: $kept; garbage-collect: $kept; garbage-collect --delete-untagged: $gone" seen
