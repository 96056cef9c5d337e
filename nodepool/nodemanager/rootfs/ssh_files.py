"""Files of sshd inside a sliver, which runs `sshd -i` per connection (NM-C.4)."""

from __future__ import annotations

import os
import subprocess
import tempfile

CONFIG_PATH = "/etc/ssh/sshd_config_nodepool"
HOST_KEY_PATH = "/etc/ssh/ssh_host_ed25519_key"
SSHD_ARGV = ("/usr/sbin/sshd", "-i", "-e", "-f", CONFIG_PATH)

CONFIG = f"""\
# Written by nodepool-nodemanager at each start of the sliver.
HostKey {HOST_KEY_PATH}
PidFile none
AuthenticationMethods publickey
PubkeyAuthentication yes
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PermitUserEnvironment no
UsePAM no
StrictModes yes
LoginGraceTime 30
MaxAuthTries 4
UseDNS no
X11Forwarding no
PrintMotd no
PrintLastLog no
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
"""


#: Seconds for ssh-keygen.
KEYGEN_TIMEOUT = 20.0


def new_host_key() -> tuple[bytes, str]:
    """Return a new ed25519 key pair: private key file, public "ssh-ed25519 AAAA...".

    Takes well under a millisecond.

    :raises OSError: the pair cannot be created; the text says what is missing.
    """
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError:
        # A daemon that was pushed to a machine has no compiled packages (C.8).
        return _keygen()
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return private, public.decode()


def _keygen() -> tuple[bytes, str]:
    """Return a key pair created by OpenSSH's program, in about 10 ms."""
    with tempfile.TemporaryDirectory(prefix="nodepool-key-") as folder:
        path = os.path.join(folder, "key")
        try:
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", path],
                check=True,
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=KEYGEN_TIMEOUT,
            )
        except subprocess.SubprocessError as error:
            raise OSError(f"ssh-keygen cannot create a host key: {error}") from error
        with open(path, "rb") as private, open(f"{path}.pub", encoding="ascii") as public:
            return private.read(), " ".join(public.read().split()[:2])
