#!/bin/sh
# diskimage-builder 3.43.0 (PyPI), disk-image-create: the format squashfs is written only if it is the first one of -t: the
# loop over the formats has the index X, and its test of squashfs reads x. The status is 0. The file is NAME.squash, not
# NAME.squashfs. Runs that loop alone, with stand-ins for what needs root.
# Seen: "squashfs,raw: disk.squash; raw,squashfs: nothing".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check diskimage-builder==3.43.0
program=$("$work/venv/bin/python" -c 'import diskimage_builder.paths as p; print(p.get_path("lib"))')/disk-image-create
sed -n '/^for X in/,/^done/p' "$program" >"$work/loop"
mkdir "$work/bin"
printf '#!/bin/sh\nexec "$@"\n' >"$work/bin/sudo"
printf '#!/bin/sh\ntouch "$2"\n' >"$work/bin/mksquashfs"
chmod +x "$work/bin/sudo" "$work/bin/mksquashfs"
run() {
    rm -rf "$work/out"
    mkdir "$work/out"
    (
        cd "$work/out"
        PATH="$work/bin:$PATH" TMP_BUILD_DIR="$work" IMAGE_NAME=disk \
            bash -ec 'IMAGE_TYPES=("$@"); . "$0"' "$work/loop" "$@"
    )
    found=$(ls "$work/out")
    echo "${found:-nothing}"
}
seen="squashfs,raw: $(run squashfs raw); raw,squashfs: $(run raw squashfs)"
echo "$seen"
[ "$seen" = "squashfs,raw: disk.squash; raw,squashfs: nothing" ]
