#!/bin/sh
# diskimage-builder 3.43.0 (PyPI), its element source-repositories: the last line of a file source-repository-NAME counts
# only if a newline ends it. Without one, this source is not fetched, and the status is 0: the build fails later, or ends
# with an image that lacks the source. A file with a single line, the usual case, thus does nothing.
# Seen: "with a newline: fetched; without: nothing, status 0".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check diskimage-builder==3.43.0
PATH="$work/venv/bin:$PATH"
elements=$(python3 -c 'import diskimage_builder.paths as p; print(p.get_path("elements"))')
mkdir -p "$work/bin" "$work/hooks/bin"
# Nothing here needs the rights of root.
printf '#!/bin/sh\nexec "$@"\n' >"$work/bin/sudo"
chmod +x "$work/bin/sudo"
cp "$elements/cache-url/bin/cache-url" "$work/hooks/bin"
echo text >"$work/source"
export PATH="$work/bin:$PATH" TMP_HOOKS_PATH="$work/hooks" DIB_IMAGE_CACHE="$work/cache" IMAGE_NAME=image DIB_OFFLINE=
export DIB_DEFAULT_INSTALLTYPE=source DIB_MANIFEST_IMAGE_DIR=/etc
run() {
    rm -rf "$work/tree" "$work/cache"
    mkdir -p "$work/tree/etc" "$work/tree/tmp"
    export TMP_MOUNT_PATH="$work/tree"
    status=0
    bash "$elements/source-repositories/extra-data.d/98-source-repositories" >/dev/null 2>&1 || status=$?
    if [ -e "$work/tree/opt/source" ]; then seen=fetched; else seen=nothing; fi
}
printf 'tool file /opt/source file://%s/source\n' "$work" >"$work/hooks/source-repository-tool"
run
first=$seen
printf 'tool file /opt/source file://%s/source' "$work" >"$work/hooks/source-repository-tool"
run
echo "with a newline: $first; without: $seen, status $status"
[ "with a newline: $first; without: $seen, status $status" = "with a newline: fetched; without: nothing, status 0" ]
