#!/bin/sh
# diskimage-builder 3.43.0 (PyPI), its element pkg-map: in the section `release` the release 8-stream of CentOS is found
# under "8", but 9-stream and 10-stream are not found under "9" and "10": they need the whole name. An element that was
# extended by copying its entry for 8 silently gets the names of the section `distro`, or of a less specific one.
# Seen: "8-stream: for-8; 9-stream: for-all; 10-stream: for-all".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check diskimage-builder==3.43.0
PATH="$work/venv/bin:$PATH"
elements=$(python3 -c 'import diskimage_builder.paths as p; print(p.get_path("elements"))')
cat >"$work/pkg-map" <<'END'
{"release": {"centos": {"8": {"tool": "for-8"}, "9": {"tool": "for-9"}, "10": {"tool": "for-10"}}},
 "distro": {"centos": {"tool": "for-all"}}}
END
seen=
for release in 8-stream 9-stream 10-stream; do
    name=$(python3 "$elements/pkg-map/bin/pkg-map" --pkg-map "$work/pkg-map" --distro centos --release "$release" tool 2>/dev/null)
    seen="$seen; $release: $name"
done
echo "${seen#; }"
[ "${seen#; }" = "8-stream: for-8; 9-stream: for-all; 10-stream: for-all" ]
