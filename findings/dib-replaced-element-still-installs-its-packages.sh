#!/bin/sh
# diskimage-builder 3.43.0 (PyPI), package-installs-squash of its element package-installs: an element of your own that
# replaces another of the same name (earlier in ELEMENTS_PATH, or one that comes with diskimage-builder) replaces its
# hooks, but not its package-installs.yaml: the packages of both are installed. The documentation ("Element priority")
# says that the earlier one is chosen over the later one; a comment in the program says so, too.
# Seen: "element used: first/tools; packages installed: from-first from-second".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check diskimage-builder==3.43.0
PATH="$work/venv/bin:$PATH"
elements=$(python3 -c 'import diskimage_builder.paths as p; print(p.get_path("elements"))')
for directory in first second; do
    mkdir -p "$work/$directory/tools"
    echo "from-$directory:" >"$work/$directory/tools/package-installs.yaml"
    echo operating-system >"$work/$directory/tools/element-provides"
done
export ELEMENTS_PATH="$work/first:$work/second" ARCH=amd64
used=$(python3 -c '
from diskimage_builder import element_dependencies
print(*(path for name, path in element_dependencies.get_elements(["tools"])))' 2>/dev/null)
squash="$elements/package-installs/bin/package-installs-squash"
python3 "$squash" --elements tools --path "$ELEMENTS_PATH" "$work/list" >/dev/null 2>&1
packages=$(python3 -c '
import json, sys
print(*(name for name, element in json.load(open(sys.argv[1]))["install.d"]["install"]))' "$work/list")
seen="element used: ${used#"$work/"}; packages installed: $packages"
echo "$seen"
[ "$seen" = "element used: first/tools; packages installed: from-first from-second" ]
