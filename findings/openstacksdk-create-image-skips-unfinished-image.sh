#!/bin/sh
# openstacksdk 4.22.0 with keystoneauth1 5.18.1 (PyPI): create_image() checks by the name whether an image with the same content
# exists, and returns that instead of an upload. It compares the checksums that the first attempt stored, and ignores the
# status: after an upload that was cut off with its process, the next create_image(..., wait=True) returns the image without
# data ("queued") as the result, at each attempt. The checksums are computed with validate_checksum=True only: without it,
# "allow_duplicates", which is False, allows a duplicate; the third call fails because there are two.
# Seen: "with checksums: queued, uploads 0, images 1; without: active, uploads 1, images 2; third: DuplicateResource".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check openstacksdk==4.22.0 keystoneauth1==5.18.1
cat >"$work/run.py" <<'END'
import http.server
import json
import subprocess
import sys
import threading
import urllib.parse

import openstack
from keystoneauth1.session import Session
from keystoneauth1.token_endpoint import Token

images = {}
uploads = []
cut = []


class Glance(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        address = urllib.parse.urlsplit(self.path)
        parts = [part for part in address.path.split("/") if part]
        if parts == ["v2", "images"]:
            names = urllib.parse.parse_qs(address.query).get("name")
            self.answer(200, {"images": [image for image in images.values() if not names or image["name"] in names]})
        elif parts[:2] == ["v2", "images"]:
            self.answer(200, images[parts[2]]) if parts[2] in images else self.answer(404, {})
        else:
            link = {"href": f"http://{self.headers['Host']}/v2/", "rel": "self"}
            self.answer(200, {"versions": [{"id": "v2.9", "status": "CURRENT", "links": [link]}]})

    def do_POST(self):
        value = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        image = value | {"id": f"image{len(images)}", "status": "queued", "visibility": "private", "tags": []}
        images[image["id"]] = image
        self.answer(201, image)

    def do_PUT(self):
        if cut:
            cut[0].terminate()
            return
        self.rfile.read(int(self.headers["Content-Length"]))
        images[self.path.split("/")[-2]]["status"] = "active"
        uploads.append(self.path)
        self.answer(204, None)

    def answer(self, status, value):
        body = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


def create(url, **options):
    cloud = openstack.connection.Connection(session=Session(Token(url, "token")), image_endpoint_override=f"{url}/v2")
    return cloud.image.create_image("node", filename=sys.argv[1], wait=True, **options)


if len(sys.argv) > 2:
    create(sys.argv[2], validate_checksum=True)
    sys.exit("the upload was not cut off")

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Glance)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
# The first attempt ends with its process, while it uploads.
process = subprocess.Popen([sys.executable, __file__, sys.argv[1], url])
cut.append(process)
assert process.wait(60) < 0
cut.clear()
seen = []
for name, options in (("with checksums", {"validate_checksum": True}), ("without", {}), ("third", {})):
    try:
        create(url, **options)
        # What the name stands for now: the first image, or the new one.
        seen.append(f"{name}: {list(images.values())[-1]['status']}, uploads {len(uploads)}, images {len(images)}")
    except Exception as problem:
        seen.append(f"{name}: {type(problem).__name__}")
print("; ".join(seen))
END
head -c 100000 /dev/zero >"$work/image"
env -u OS_CLOUD "$work/venv/bin/python" "$work/run.py" "$work/image" | tee "$work/seen"
grep -qxF 'with checksums: queued, uploads 0, images 1; without: active, uploads 1, images 2; third: DuplicateResource' "$work/seen"
