#!/bin/sh
# python-jenkins 1.8.3 (PyPI): Jenkins has one call that toggles the mark "temporarily offline" of a node. disable_node() and
# enable_node() decide by the field "offline" whether to send it, and that is also true for a node that is not connected.
# enable_node() on a node whose agent is restarting sets the mark: the node is disabled, and gets no builds when it is back;
# a second call removes the mark. disable_node() on such a node does nothing: it gets builds as soon as it is back. Neither
# raises an error. The field "temporarilyOffline" is in the same answer.
# Seen: "connected: disable_node twice: marked; enable_node twice: not marked. Not connected: disable_node: not marked;
# enable_node: marked; enable_node again: not marked" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check python-jenkins==1.8.3
cat >"$work/run.py" <<'END'
import http.server
import json
import threading

import jenkins

connected = True
marked = False


class Jenkins(http.server.BaseHTTPRequestHandler):
    """One node. It is offline if it is marked or not connected, as in Jenkins."""

    def answer(self, status, value=None):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("X-Jenkins", "2.541.1")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if not self.path.startswith("/computer/node/api/json"):
            return self.answer(404)
        offline = marked or not connected
        return self.answer(200, {"displayName": "node", "offline": offline, "temporarilyOffline": marked})

    def do_POST(self):
        global marked
        assert self.path.startswith("/computer/node/toggleOffline"), self.path
        marked = not marked
        self.answer(200)

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Jenkins)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = jenkins.Jenkins(f"http://127.0.0.1:{server.server_port}", timeout=10)


def after(call):
    call("node")
    return "marked" if marked else "not marked"


after(client.disable_node)
seen = f"connected: disable_node twice: {after(client.disable_node)}; "
after(client.enable_node)
seen += f"enable_node twice: {after(client.enable_node)}. "
connected = False
seen += f"Not connected: disable_node: {after(client.disable_node)}; "
seen += f"enable_node: {after(client.enable_node)}; "
seen += f"enable_node again: {after(client.enable_node)}"
print(seen)
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
first='connected: disable_node twice: marked; enable_node twice: not marked.'
grep -qx "$first Not connected: disable_node: not marked; enable_node: marked; enable_node again: not marked" "$work/seen"
