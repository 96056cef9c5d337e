"""What root inside plants where the node manager writes and runs programs: links, mounts, files
of other kinds.
"""

from __future__ import annotations

import hashlib
import pathlib
import sys

import pytest

from tests.attacks.conftest import ATTACKER, VICTIM
from tests.support.nodemanager.scene import NmDaemon

WATCHED = [
    "/etc/passwd",
    "/etc/shadow",
    "/etc/hosts",
    sys.executable,
    "/usr/sbin/sshd",
    "/bin/sh",
    "/root/.ssh/authorized_keys",
]


def prints(paths: list[str]) -> dict[str, str]:
    return {
        path: hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
        for path in paths
        if pathlib.Path(path).exists()
    }


PLANTS = {
    "31 .ssh is a link to /etc": "rm -rf /root/.ssh; ln -s /etc /root/.ssh",
    "32 authorized_keys is a link through process 1": "ln -sf /proc/1/root/etc/passwd "
    "/root/.ssh/authorized_keys",
    "33 the home is a link to itself": "rm -rf /home/zuul; ln -s /proc/self/root/root /home/zuul",
    "34 the home is a path upwards": "sed -i 's#:/root:#:/../../../etc:#' /etc/passwd",
    "35 the home is a device": "sed -i 's#:/root:#:/dev/null:#' /etc/passwd",
    "36 passwd is a FIFO": "rm /etc/passwd; mkfifo /etc/passwd",
    "37 passwd has 200 MB": "head -c 50M /dev/zero | tr '\\0' 'x' >> /etc/passwd",
    "38 rc.vinit is a directory": "mkdir -p /etc/rc.vinit/x",
    "39 the directory of the host keys is a link": "mv /etc/ssh /etc/ssh2; ln -s /etc/ssh2 "
    "/etc/ssh",
    "40 /etc is a link": "mv /etc /etc2; ln -s /etc2 /etc",
    "the console file of the host is guessed": "mkdir -p /console; ln -s /etc/shadow /console.old",
    "27 sshd runs itself (CVE-2019-5736)": "printf '#!/proc/self/exe\\n' > /usr/sbin/sshd; chmod "
    "755 /usr/sbin/sshd",
    "27 sshd is a link to the program that runs it": "ln -sf /proc/self/exe /usr/sbin/sshd",
    "libraries that every program loads": "printf '/lib/evil.so\\n' > /etc/ld.so.preload",
    "/dev/null is a file": "rm /dev/null; echo x > /dev/null",
    "/dev/null is a FIFO": "rm /dev/null; mkfifo /dev/null",
    "/tmp, /run and /var/run are links": "rm -rf /tmp; ln -s /etc /tmp; rm -rf /var/run; ln -s "
    "/etc /var/run",
    "names with escapes for terminals": "hostname $(printf 'x\\033[2J') 2>/dev/null; touch "
    "\"$(printf '/root/\\033]0;x\\007')\"",
}


@pytest.mark.spec(
    "issue 10, 2 and F16: links and mounts planted before keys, init scripts and restarts "
    "(attempts 27, 30 to 40)"
)
@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS.keys())
def test_planted_links_and_mounts_harm_only_their_sliver(host: NmDaemon, plant: str) -> None:
    name = "planted"
    before = prints(WATCHED)
    host.put(name, rspec={"nm_mem_limit": 256, "nm_pids_max": 200})
    try:
        host.ssh(name, plant, timeout=60, check=False)
        key = host.key.with_suffix(".pub").read_text().split()
        # Other keys, another init script, a restart: each may fail, and harms nobody but the
        # sliver.
        host.put(
            name,
            wait=False,
            ssh_keys=f"{key[0]} {key[1]} other",
            initscript="IyEvYmluL3NoCmVjaG8geAo=",
        )
        host.client.call("WaitSliver", name, "ready", 20, timeout=30)
        host.ssh(name, "true", check=False, timeout=60)
        host.client.call("ReCreate", name, timeout=60)
        host.client.call("WaitSliver", name, "ready", 20, timeout=30)
        host.ssh(name, "true", check=False, timeout=60)
        assert host.ssh(VICTIM, "echo well") == "well\n"
        assert host.ssh(ATTACKER, "echo well") == "well\n"
        assert prints(WATCHED) == before
        assert "\x1b" not in host.log
        assert "Traceback" not in host.log, host.log[-3000:]
    finally:
        host.delete(name)
