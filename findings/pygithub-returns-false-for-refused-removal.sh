#!/bin/sh
# PyGithub 2.10.0 (PyPI): remove_self_hosted_runner() of a repository and cancel() of a run return False, without a reason,
# if GitHub answers 422 (the runner is busy), 404, or 401 (the token has expired). For 403 they raise, and
# get_self_hosted_runner() raises for all of them, as most methods do. A clean-up that expects a GithubException takes a
# busy runner for removed, and deletes the machine of a job that runs.
# Seen: "get raises 422 404 401 403; remove raises 403, False for 422 404 401; cancel raises 403, False for 422 404 401".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check PyGithub==2.10.0
cat >"$work/run.py" <<'END'
import http.server
import json
import threading

import github

status = 200


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        repository = f"http://127.0.0.1:{self.server.server_port}/repos/o/r"
        answer = {"id": 7, "url": repository, "cancel_url": f"{repository}/actions/runs/7/cancel", "message": "refused"}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_DELETE = do_POST = do_GET

    def log_message(self, *_args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
options = {"seconds_between_requests": 0, "seconds_between_writes": 0}
client = github.Github(base_url=f"http://127.0.0.1:{server.server_port}", auth=github.Auth.Token("x"), **options)
repository = client.get_repo("o/r")
run = repository.get_workflow_run(7)
calls = {
    "get": lambda: repository.get_self_hosted_runner(7),
    "remove": lambda: repository.remove_self_hosted_runner(7),
    "cancel": run.cancel,
}
seen = []
for name, call in calls.items():
    raised, false = [], []
    for status in (422, 404, 401, 403):
        try:
            result = call()
        except github.GithubException as error:
            assert error.status == status
            raised.append(str(status))
        else:
            assert result is False
            false.append(str(status))
    seen.append(f"{name} raises {' '.join(raised)}" + (f", False for {' '.join(false)}" if false else ""))
print("; ".join(seen))
END
"$work/venv/bin/python" "$work/run.py" 2>/dev/null | tee "$work/seen"
rest='raises 403, False for 422 404 401'
grep -qx "get raises 422 404 401 403; remove $rest; cancel $rest" "$work/seen"
