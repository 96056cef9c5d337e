#!/bin/sh
# kubernetes 34.1.0 (PyPI, the Python client): if the exec plug-in of a kubeconfig user fails, load_kube_config() raises
# nothing. The client is configured without credentials, and the only trace of the reason is a message of the root
# logger, not of a logger of the library. A program that does not show the root logger sees 401 Unauthorized later.
# kubectl reports the failure and stops.
# Seen: "raised: nothing, credentials: 0, loggers with the reason: ['root']".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check kubernetes==34.1.0
cat >"$work/plugin" <<'END'
#!/bin/sh
echo "the login has expired" >&2
exit 1
END
chmod +x "$work/plugin"
cat >"$work/config" <<END
apiVersion: v1
kind: Config
current-context: one
contexts: [{name: one, context: {cluster: one, user: one}}]
clusters: [{name: one, cluster: {server: "http://127.0.0.1:1"}}]
users:
  - name: one
    user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: "$work/plugin", interactiveMode: Never}}
END
cat >"$work/run.py" <<'END'
import logging
import sys

from kubernetes import client, config

names = []


class Collect(logging.Handler):
    def emit(self, record):
        if "login has expired" in record.getMessage() or "exec" in record.getMessage():
            names.append(record.name)


logging.getLogger().addHandler(Collect())
made, raised = client.Configuration(), "nothing"
try:
    config.load_kube_config(config_file=sys.argv[1], client_configuration=made, persist_config=False)
except Exception as error:
    raised = type(error).__name__
print(f"raised: {raised}, credentials: {len(made.api_key)}, loggers with the reason: {sorted(set(names))}")
END
"$work/venv/bin/python" "$work/run.py" "$work/config" 2>/dev/null | tee "$work/seen"
grep -qx "raised: nothing, credentials: 0, loggers with the reason: \['root'\]" "$work/seen"
