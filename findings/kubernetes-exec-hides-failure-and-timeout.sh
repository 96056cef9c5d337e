#!/bin/sh
# kubernetes 37.0.1 with websockets 17.4 (PyPI): stream(connect_get_namespaced_pod_exec, ...) as in the examples returns the
# output of a command in a pod as a text, and nothing else: a command that fails returns its output like one that succeeds.
# At the end of _request_timeout, which raises an error for all other requests, it returns the part of the output that has
# arrived, while the command still runs. Only _preload_content=False gives an object with a returncode.
# Seen: "exit 0: 'half', exit 3: 'half', timeout: 'half' after 2 s; with returncode: 0, 3, None; list at timeout: MaxRetryError".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check kubernetes==37.0.1 websockets==17.4
cat >"$work/run.py" <<'END'
import asyncio
import json
import socket
import threading
import time

import kubernetes
import websockets
from kubernetes.stream import stream

STATUS = {
    "0": {"status": "Success"},
    "3": {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [{"reason": "ExitCode", "message": "3"}]}},
}
ports, ready = [], threading.Event()


async def execute(connection):
    """Answer as the API server does: channel 1 is the standard output, channel 3 the status at the end."""
    await connection.send(b"\x01half")
    command = connection.request.path.split("command=")[1].split("&")[0]
    if command in STATUS:
        await connection.send(b"\x03" + json.dumps(STATUS[command]).encode())
        await connection.close()
    else:
        await connection.wait_closed()


async def serve():
    async with websockets.serve(execute, "127.0.0.1", 0, subprotocols=["v4.channel.k8s.io"]) as server:
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()
        await asyncio.Future()


def core(port):
    host = f"http://127.0.0.1:{port}"
    return kubernetes.client.CoreV1Api(kubernetes.client.ApiClient(kubernetes.client.Configuration(host=host)))


def run(command, **options):
    call = core(ports[0]).connect_get_namespaced_pod_exec
    return stream(call, "pod", "ci", command=[command], stdout=True, stderr=True, **options)


def returncode(command):
    client = run(command, _preload_content=False)
    client.run_forever(timeout=2)
    return client.returncode


threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
ready.wait(30)
texts = [f"exit {command}: {run(command, _request_timeout=30)!r}" for command in STATUS]
begin = time.monotonic()
late = run("sleep", _request_timeout=2)
took = "2 s" if 1.5 < time.monotonic() - begin < 20 else "another time"
codes = ", ".join(str(returncode(command)) for command in ("0", "3", "sleep"))
with socket.create_server(("127.0.0.1", 0)) as silent:
    api = core(silent.getsockname()[1])
    api.api_client.rest_client.pool_manager.connection_pool_kw["retries"] = 0
    try:
        api.list_namespaced_pod("ci", _request_timeout=1)
        other = "no error"
    except Exception as error:
        other = type(error).__name__
print(f"{', '.join(texts)}, timeout: {late!r} after {took}; with returncode: {codes}; list at timeout: {other}")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
first="exit 0: 'half', exit 3: 'half', timeout: 'half' after 2 s; with returncode: 0, 3, None"
grep -qx "$first; list at timeout: MaxRetryError" "$work/seen"
