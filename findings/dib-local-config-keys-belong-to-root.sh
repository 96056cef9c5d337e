#!/bin/sh
# diskimage-builder 3.43.0 (PyPI), its element local-config, with util-linux: with DIB_LOCAL_CONFIG_USERNAME, the public
# keys of the person who builds the image are installed for that user, but ~/.ssh and authorized_keys belong to root,
# with modes 700 and 600. sshd reads the file with the rights of the user, so that a login with these keys fails.
# The default user, root, is not affected, and the element devuser, which also installs keys, changes their owner.
# Seen: "user zuul: .ssh root 700, authorized_keys root 600".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check diskimage-builder==3.43.0
PATH="$work/venv/bin:$PATH"
elements=$(python3 -c 'import diskimage_builder.paths as p; print(p.get_path("elements"))')
mkdir -p "$work/tmp/in_target.d"
echo 'ssh-ed25519 AAAA somebody@example.org' >"$work/tmp/in_target.d/ssh-authorized-keys"
cp "$elements/local-config/install.d/62-ssh-key" "$work/tmp/hook"
cat >"$work/run" <<'END'
#!/bin/sh
set -eu
# Hides /home and /tmp of this machine for this process.
mount -t tmpfs tmpfs /home
mount --bind "$1/tmp" /tmp
mkdir /home/zuul
# Possible with the rights of root only.
chown 1000:1000 /home/zuul 2>/dev/null || :
bash /tmp/hook
cd /home/zuul
echo "user zuul: .ssh $(stat -c '%U %a' .ssh), authorized_keys $(stat -c '%U %a' .ssh/authorized_keys)"
END
DIB_LOCAL_CONFIG_USERNAME=zuul unshare --map-root-user --mount sh "$work/run" "$work" 2>/dev/null | tee "$work/seen"
grep -qx 'user zuul: .ssh root 700, authorized_keys root 600' "$work/seen"
