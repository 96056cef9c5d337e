#!/bin/sh
# requests 2.34.2 (PyPI): a call with stream=True and allow_redirects=False is to return as soon as the headers have
# arrived, and leave the body to the caller. If the answer is a redirect (a status of redirects and a Location header),
# the whole body is read before the call returns: to offer Response.next, requests runs the first step of its redirect
# loop, which consumes the content. Response.raw is then at its end, and a limit that the caller applies while reading
# from it applies to nothing. Without a Location header, or with get_redirect_target overridden, nothing is read.
# Seen: "302 with Location: 0 of 65536 bytes left to the caller; 302 without: 65536 of 65536".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check requests==2.34.2
cat >"$work/run.py" <<'END'
import http.server
import threading

import requests

BODY = b"x" * 65536


class Service(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(302)
        if self.path == "/with":
            self.send_header("Location", "/there")
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY)

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"


def left(path):
    with requests.Session() as session:
        session.trust_env = False
        with session.get(url + path, stream=True, allow_redirects=False, timeout=10) as answer:
            return len(answer.raw.read())


print(f"302 with Location: {left('/with')} of {len(BODY)} bytes left to the caller; 302 without: {left('/without')} of {len(BODY)}")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qx '302 with Location: 0 of 65536 bytes left to the caller; 302 without: 65536 of 65536' "$work/seen"
