#!/bin/sh
# diskimage-builder 3.43.0 (PyPI), its element install-static, with rsync: files of `static/` in an element do not all
# reach the image. The element calls rsync with its option for trees under version control (-C), which omits names that
# CVS ignores: core, tags, *.so, *.a, *.o, *.old, *.orig, *.bak and directories such as .git, also below /usr/lib or
# /opt. There is no message, and the status is 0. Its README names the options of rsync, not what they omit.
# Seen: "copied: etc/tool.conf usr/lib/libtool.so.1; omitted: etc/tool.conf.orig usr/lib/libtool.so usr/share/core".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check diskimage-builder==3.43.0
PATH="$work/venv/bin:$PATH"
elements=$(python3 -c 'import diskimage_builder.paths as p; print(p.get_path("elements"))')
mkdir -p "$work/hooks" "$work/bin" "$work/image"
cp -r "$elements/install-static/install.d" "$work/hooks"
for name in etc/tool.conf etc/tool.conf.orig usr/lib/libtool.so usr/lib/libtool.so.1 usr/share/core; do
    mkdir -p "$work/hooks/static/$(dirname "$name")"
    echo text >"$work/hooks/static/$name"
done
# The image in place of the root directory of this machine.
cat >"$work/bin/rsync" <<END
#!/bin/bash
exec $(command -v rsync) "\${@:1:\$#-1}" "$work/image\${@: -1}"
END
chmod +x "$work/bin/rsync"
PATH="$work/bin:$PATH" bash "$work/hooks/install.d/10-install-static-files" 2>/dev/null
copied=$(cd "$work/image" && find . -type f | sed 's,^\./,,' | LC_ALL=C sort | tr '\n' ' ')
omitted=
for name in $(cd "$work/hooks/static" && find . -type f | sed 's,^\./,,' | LC_ALL=C sort); do
    [ -e "$work/image/$name" ] || omitted="$omitted $name"
done
seen="copied: ${copied% }; omitted:$omitted"
echo "$seen"
[ "$seen" = "copied: etc/tool.conf usr/lib/libtool.so.1; omitted: etc/tool.conf.orig usr/lib/libtool.so usr/share/core" ]
