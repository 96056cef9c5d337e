#!/bin/sh
# diskimage-builder 3.43.0 (PyPI), its element source-repositories, with git: with DIB_GITREPOBASE (a mirror in place of the
# servers of the repositories) the clones are not cached in DIB_IMAGE_CACHE, but in ~/.cache/image-create of the user,
# in its old directory repository-sources. A builder with a disk for its cache fills the home directory instead, and a
# user without a writable home directory cannot build. The README names neither.
# Seen: "clones without DIB_GITREPOBASE: 1 in DIB_IMAGE_CACHE, 0 in HOME; with it: 0 in DIB_IMAGE_CACHE, 1 in HOME".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check diskimage-builder==3.43.0
PATH="$work/venv/bin:$PATH"
elements=$(python3 -c 'import diskimage_builder.paths as p; print(p.get_path("elements"))')
mkdir -p "$work/bin" "$work/hooks/bin" "$work/mirror/project"
# Nothing here needs the rights of root.
printf '#!/bin/sh\nexec "$@"\n' >"$work/bin/sudo"
chmod +x "$work/bin/sudo"
cp "$elements/cache-url/bin/cache-url" "$work/hooks/bin"
export HOME="$work/home" GIT_CONFIG_NOSYSTEM=1
git init -q "$work/mirror/project/tool"
git -C "$work/mirror/project/tool" -c user.name=x -c user.email=x@example.org commit -q --allow-empty -m x
git -C "$work/mirror/project/tool" branch -q -f -m master
export PATH="$work/bin:$PATH" TMP_HOOKS_PATH="$work/hooks" DIB_IMAGE_CACHE="$work/cache" IMAGE_NAME=image DIB_OFFLINE=
export DIB_DEFAULT_INSTALLTYPE=source DIB_MANIFEST_IMAGE_DIR=/etc TMP_MOUNT_PATH="$work/build.1/mnt"
count() {
    if [ -d "$1" ]; then find "$1" -name HEAD -path '*/.git/HEAD' | wc -l; else echo 0; fi
}
# Where the clone of a repository at the given address is cached.
clones() {
    rm -rf "$work/build.1" "$work/cache" "$work/home"
    mkdir -p "$work/build.1/mnt/etc" "$work/build.1/mnt/tmp" "$work/home"
    echo "tool git /opt/tool $1 master" >"$work/hooks/source-repository-tool"
    bash "$elements/source-repositories/extra-data.d/98-source-repositories" >/dev/null 2>&1
    [ -d "$work/build.1/mnt/opt/tool/.git" ]
    echo "$(count "$work/cache") in DIB_IMAGE_CACHE, $(count "$work/home") in HOME"
}
plain=$(clones "file://$work/mirror/project/tool")
with=$(DIB_GITREPOBASE="file://$work/mirror/" clones https://git.example.org/project/tool)
seen="clones without DIB_GITREPOBASE: $plain; with it: $with"
echo "$seen"
[ "$seen" = "clones without DIB_GITREPOBASE: 1 in DIB_IMAGE_CACHE, 0 in HOME; with it: 0 in DIB_IMAGE_CACHE, 1 in HOME" ]
