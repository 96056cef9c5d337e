"""What sshd needs inside a sliver that is reached by `sshd -i` per connection (nodemanager.md C.4)."""

from __future__ import annotations

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

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


def new_host_key() -> tuple[bytes, str]:
    """A fresh ed25519 pair: private part as a file, public part as "ssh-ed25519 AAAA...". Takes well under a millisecond."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return private, public.decode()
