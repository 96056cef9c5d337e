#!/bin/sh
# diskimage-builder 3.43.0 (PyPI), cache-url of its element of this name, with curl: a cached file is loaded again only if
# the server's file is younger than the download. The cached file has the time of the download, not that of the server's
# file, and this time is sent as If-Modified-Since. So a base image that is replaced by one with an older date (a
# roll-back to the previous release, a link that is turned back) is never loaded, until the cache is deleted.
# Seen: "first: new; after the roll-back: new; server has: old; cache-url says: Server copy has not changed".
set -eu
work=$(mktemp -d)
trap 'kill "$server" 2>/dev/null || :; rm -rf "$work"' EXIT
server=
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check diskimage-builder==3.43.0
PATH="$work/venv/bin:$PATH"
elements=$(python3 -c 'import diskimage_builder.paths as p; print(p.get_path("elements"))')
mkdir "$work/www"
cat >"$work/serve.py" <<'END'
import functools
import http.server
import sys

handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=sys.argv[1])
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
with open(sys.argv[2], "w") as file:
    file.write(f"http://127.0.0.1:{server.server_port}/image")
server.serve_forever()
END
echo new >"$work/www/image"
touch -d '-1 month' "$work/www/image"
python3 "$work/serve.py" "$work/www" "$work/url" 2>/dev/null &
server=$!
for _ in $(seq 300); do
    [ ! -s "$work/url" ] || break
    sleep 0.1
done
load() {
    bash "$elements/cache-url/bin/cache-url" "$(cat "$work/url")" "$work/cache/image" 2>/dev/null
}
load >/dev/null
first=$(cat "$work/cache/image")
echo old >"$work/www/image"
touch -d '-2 months' "$work/www/image"
said=$(load | grep -o '^Server copy has not changed')
seen="first: $first; after the roll-back: $(cat "$work/cache/image"); server has: $(cat "$work/www/image"); cache-url says: $said"
echo "$seen"
[ "$seen" = "first: new; after the roll-back: new; server has: old; cache-url says: Server copy has not changed" ]
