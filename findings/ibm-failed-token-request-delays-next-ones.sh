#!/bin/sh
# ibm-cloud-sdk-core 3.28.0 (PyPI): after a request for a token that has failed, all calls of the same authenticator sleep
# until 60 s after that request, although no request is under way: the time that marks one as active is reset only when it
# succeeds. The first call reports the error immediately; every later one, of all threads, blocks for up to a minute, also
# with a shorter timeout in set_http_config(), and also if the token service has recovered. A new authenticator does not
# wait.
# Seen: "status 503: ApiException within 5 s; service back: old authenticator: token after 50 s or more, new authenticator:
# token within 5 s" (on one line). It takes a minute.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check ibm-cloud-sdk-core==3.28.0
cat >"$work/run.py" <<'END'
import http.server
import json
import threading
import time

import jwt
from ibm_cloud_sdk_core.authenticators import IAMAuthenticator

up = False


class TokenService(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        end = int(time.time()) + 3600
        token = jwt.encode({"iat": end - 3600, "exp": end}, "k" * 32, algorithm="HS256")
        value = {"access_token": token, "refresh_token": "none", "expires_in": 3600, "expiration": end} if up else {}
        body = json.dumps(value).encode()
        self.send_response(200 if up else 503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), TokenService)
threading.Thread(target=server.serve_forever, daemon=True).start()


def authenticator():
    made = IAMAuthenticator("key", url=f"http://127.0.0.1:{server.server_port}")
    made.token_manager.http_config = {"timeout": 5}
    return made


def timed(one):
    request = {"headers": {}}
    start = time.monotonic()
    try:
        one.authenticate(request)
        what = "token"
    except Exception as error:
        what = type(error).__name__
    seconds = time.monotonic() - start
    return what, "within 5 s" if seconds < 5 else "after 50 s or more" if seconds >= 50 else f"after {seconds:.0f} s"


old = authenticator()
first = " ".join(timed(old))
up = True
new = " ".join(timed(authenticator()))
print(f"status 503: {first}; service back: old authenticator: {' '.join(timed(old))}, new authenticator: {new}")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
first='status 503: ApiException within 5 s; service back: old authenticator: token after 50 s or more'
grep -qx "$first, new authenticator: token within 5 s" "$work/seen"
