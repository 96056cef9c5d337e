#!/bin/sh
# ibm-cos-sdk 2.16.2 (PyPI, ibm_boto3): the timeouts and retries of Config(...) do not apply to the request for an IAM
# token, which a client with an API key sends before its first call. The proxies of Config(...) do. The request has its
# own timeout of 5 s, and three attempts, also if IAM refuses the key (400). A client with read_timeout=1 therefore waits
# 3 s for a slow IAM, a client with read_timeout=60 fails if IAM takes 7 s, and max_attempts=0 does not prevent retries.
# Seen: "1 s, IAM takes 3 s: works; 60 s, IAM takes 7 s: ReadTimeout; max_attempts 0 and 5: 3 and 3 requests to IAM".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check ibm-cos-sdk==2.16.2
cat >"$work/run.py" <<'END'
import http.server
import json
import threading
import time

import ibm_boto3
from ibm_botocore.client import Config

asked, delay, status = [], 0, 200


class Service(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        asked.append(self.path)
        time.sleep(delay)
        token = {"access_token": "a", "refresh_token": "r", "token_type": "Bearer", "expires_in": 3600}
        token["expiration"] = int(time.time()) + 3600
        self.answer(status, json.dumps(token if status == 200 else {"errorMessage": "refused"}).encode())

    def do_GET(self):
        self.answer(200, b"<ListAllMyBucketsResult/>")

    def answer(self, code, body):
        try:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            pass

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"


def attempt(**options):
    asked.clear()
    storage = ibm_boto3.client(
        "s3",
        ibm_api_key_id="key",
        ibm_service_instance_id="crn",
        ibm_auth_endpoint=url + "/identity/token",
        endpoint_url=url,
        config=Config(signature_version="oauth", **options),
    )
    try:
        storage.list_buckets()
    except Exception as error:
        return type(error).__name__
    return "works"


delay = 3
short = attempt(read_timeout=1, retries={"max_attempts": 0})
delay = 7
long = attempt(read_timeout=60, retries={"max_attempts": 0})
delay, status = 0, 400
counts = []
for number in (0, 5):
    attempt(retries={"max_attempts": number})
    counts.append(len(asked))
print(
    f"1 s, IAM takes 3 s: {short}; 60 s, IAM takes 7 s: {long}; "
    f"max_attempts 0 and 5: {counts[0]} and {counts[1]} requests to IAM"
)
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qx '1 s, IAM takes 3 s: works; 60 s, IAM takes 7 s: ReadTimeout; max_attempts 0 and 5: 3 and 3 requests to IAM' "$work/seen"
