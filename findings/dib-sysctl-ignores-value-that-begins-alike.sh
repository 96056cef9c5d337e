#!/bin/sh
# diskimage-builder 3.43.0 (PyPI), sysctl-write-value of its element sysctl, with util-linux: two elements that set the
# same name to different values are a conflict, which ends the build. But if the second value is the beginning of the
# first (1 after 10, 65 after 65535), the second one is ignored with status 0: the values are compared by a pattern
# without an end.
# Seen: "10 after 1: status 1, value 1; 1 after 10: status 0, value 10".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check diskimage-builder==3.43.0
PATH="$work/venv/bin:$PATH"
elements=$(python3 -c 'import diskimage_builder.paths as p; print(p.get_path("elements"))')
cat >"$work/run" <<'END'
#!/bin/sh
set -eu
# Hides /etc/sysctl.d of this machine for this process.
mount -t tmpfs tmpfs /etc/sysctl.d
after() {
    rm -f /etc/sysctl.d/*
    status=0
    bash "$write" vm.swappiness "$1" >/dev/null
    bash "$write" vm.swappiness "$2" >/dev/null || status=$?
    echo "$2 after $1: status $status, value $(sed -n 's/^vm.swappiness = //p' /etc/sysctl.d/*)"
}
echo "$(after 1 10); $(after 10 1)"
END
write="$elements/sysctl/bin/sysctl-write-value" unshare --map-root-user --mount sh "$work/run" | tee "$work/seen"
grep -qx '10 after 1: status 1, value 1; 1 after 10: status 0, value 10' "$work/seen"
