#!/bin/sh
# python-gitlab 8.6.0 (PyPI): save() is for the attributes that a program has changed. A list counts as changed as soon as
# it was read: a program that reads the tags of a runner, and then changes and saves its description, also writes the
# tags as they were when it fetched the runner. A tag that somebody else has added meanwhile is removed again. After
# reading alone, save() sends a request, too. Dictionaries are the opposite: a change inside of one is never sent, and
# save() returns without a request. Reading by asdict() marks nothing.
# Seen: "description: description; tags read, description: description tag_list; tag of others: lost; tags read only:
# tag_list; changed in a dictionary: nothing; asdict read, description: description" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check python-gitlab==8.6.0
cat >"$work/run.py" <<'END'
import http.server
import json
import threading

import gitlab

stored = {}
sent = []


class Forge(http.server.BaseHTTPRequestHandler):
    """One object under every path."""

    def do_GET(self):
        body = json.dumps(stored).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self):
        data = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        sent.extend(sorted(data))
        stored.update(data)
        self.do_GET()

    def log_message(self, *_args):
        pass


def fetched(kind):
    """Return the runner or project as it is before anybody has changed it."""
    sent.clear()
    stored.clear()
    stored.update(id=7, description="old", tag_list=["linux"], container_expiration_policy={"enabled": False})
    return getattr(gitlab.Gitlab(f"http://127.0.0.1:{server.server_port}", private_token="x"), kind).get(7)


def saved(thing):
    thing.save()
    return " ".join(sent) or "nothing"


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Forge)
threading.Thread(target=server.serve_forever, daemon=True).start()
seen = []
runner = fetched("runners")
runner.description = "new"
seen.append(f"description: {saved(runner)}")
runner = fetched("runners")
if "linux" in runner.tag_list:
    runner.description = "new"
stored["tag_list"] = ["linux", "gpu"]
seen.append(f"tags read, description: {saved(runner)}")
seen.append(f"tag of others: {'there' if 'gpu' in stored['tag_list'] else 'lost'}")
runner = fetched("runners")
assert runner.tag_list
seen.append(f"tags read only: {saved(runner)}")
project = fetched("projects")
project.container_expiration_policy["enabled"] = True
seen.append(f"changed in a dictionary: {saved(project)}")
runner = fetched("runners")
assert runner.asdict()["tag_list"]
runner.description = "new"
seen.append(f"asdict read, description: {saved(runner)}")
print("; ".join(seen))
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
seen='description: description; tags read, description: description tag_list; tag of others: lost; tags read only: tag_list'
grep -qx "$seen; changed in a dictionary: nothing; asdict read, description: description" "$work/seen"
