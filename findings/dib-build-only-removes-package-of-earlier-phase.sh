#!/bin/sh
# diskimage-builder 3.43.0 (PyPI), package-installs-squash of its element package-installs: a package that one element
# needs for building (`build-only`) is kept if another element installs it for good - but only if both name the same
# phase. An element that installs it in pre-install.d loses it to another with `build-only` in the default phase:
# it is uninstalled at the end of install.d, so that the image lacks it. There is no message.
# Seen: "kept in install.d: not uninstalled; kept in pre-install.d: uninstalled in install.d".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check diskimage-builder==3.43.0
PATH="$work/venv/bin:$PATH"
elements=$(python3 -c 'import diskimage_builder.paths as p; print(p.get_path("elements"))')
mkdir -p "$work/elements/keeps" "$work/elements/needs"
printf 'tool:\n  build-only: true\n' >"$work/elements/needs/package-installs.yaml"
uninstalled() {
    printf 'tool:\n  phase: %s\n' "$1" >"$work/elements/keeps/package-installs.yaml"
    ARCH=amd64 python3 "$elements/package-installs/bin/package-installs-squash" \
        --elements "keeps needs" --path "$work/elements" "$work/list" >/dev/null 2>&1
    python3 -c '
import json, sys
phases = [name for name, lists in json.load(open(sys.argv[1])).items() if lists.get("uninstall")]
print("uninstalled in " + " ".join(phases) if phases else "not uninstalled")' "$work/list"
}
seen="kept in install.d: $(uninstalled install.d); kept in pre-install.d: $(uninstalled pre-install.d)"
echo "$seen"
[ "$seen" = "kept in install.d: not uninstalled; kept in pre-install.d: uninstalled in install.d" ]
