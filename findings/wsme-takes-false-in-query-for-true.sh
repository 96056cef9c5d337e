#!/bin/sh
# WSME 0.13.0 with pecan 1.8.0 (PyPI), which OpenStack services use for their REST APIs: an argument of the type bool is True
# for any text in the query, also for "false", "0" and "no": DELETE /nodes/1?force=false is a forced deletion. The same
# texts are False as attributes of an object in the body, and other texts are refused there with status 400. Numbers are
# checked in the query, too.
# Seen: "query: false True, 0 True, no True, flase True; body: false False, 0 False, no False, flase 400; number x: 400".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check WSME==0.13.0 pecan==1.8.0 webtest==3.0.7
cat >"$work/run.py" <<'END'
import pecan
import pecan.rest
import webtest
from wsme import types
from wsmeext.pecan import wsexpose


class Options(types.Base):
    force = bool


class Nodes(pecan.rest.RestController):
    @wsexpose(types.text, types.text, bool, int)
    def delete(self, node, force=False, wait=0):
        return str(force)

    @wsexpose(types.text, types.text, body=Options)
    def put(self, node, options):
        return str(options.force)


class Root:
    nodes = Nodes()


def answer(response):
    return response.json if response.status_int == 200 else response.status_int


app = webtest.TestApp(pecan.make_app(Root()))
texts = ("false", "0", "no", "flase")
query = [f"{text} {answer(app.delete(f'/nodes/1?force={text}', status='*'))}" for text in texts]
body = [f"{text} {answer(app.put_json('/nodes/1', {'force': text}, status='*'))}" for text in texts]
number = answer(app.delete("/nodes/1?wait=x", status="*"))
print(f"query: {', '.join(query)}; body: {', '.join(body)}; number x: {number}")
END
"$work/venv/bin/python" -W ignore "$work/run.py" | tee "$work/seen"
seen='query: false True, 0 True, no True, flase True; body: false False, 0 False, no False, flase 400; number x: 400'
grep -qxF "$seen" "$work/seen"
