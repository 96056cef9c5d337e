"""The host's own /usr in slivers of image host: what not everybody may read there, nobody reads,
whenever it appears.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator

import pytest

from tests.support.nodemanager.scene import NmDaemon, make_daemon

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may write to /usr"),
]
SECRET = "SECRET-OF-THE-HOST"


@pytest.fixture
def nm(tmp_path: pathlib.Path) -> Iterator[NmDaemon]:
    yield from make_daemon(tmp_path)


@pytest.fixture
def place() -> Iterator[pathlib.Path]:
    """A directory of an application of the host."""
    directory = pathlib.Path(f"/usr/local/share/nodepool-test-{uuid.uuid4().hex[:8]}")
    directory.mkdir(mode=0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def make(path: pathlib.Path, mode: int, text: str = SECRET) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    path.chmod(mode)


TRIES = """
cat {0}; cp {0} /root/copy && cat /root/copy; mv {0} /root/moved && cat /root/moved
chmod 644 {0}; cat {0}; ln {0} /usr/local/x
cat /usr/local/x; dd if={0} conv=notrunc,nocreat; chown 0:0 {0}; echo more >> {0}; cat {0}; true
"""


@pytest.mark.spec(
    "issue 10, F6: 0 reads of host data: files that appear, or change their mode, while slivers run"
)
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o700, 0o711, 0o4711, 0o200])
def test_a_secret_that_appears(nm: NmDaemon, place: pathlib.Path, mode: int) -> None:
    nm.put("running")
    nm.ssh("running", f"ls {place}")
    make(place / "secret", mode)
    nm.put("later")
    for name in ("running", "later"):
        out = nm.ssh(name, f"( {TRIES.format(place / 'secret')} ) 2>&1")
        assert SECRET not in out
        assert "Permission denied" in out
    assert (place / "secret").read_text() == SECRET


@pytest.mark.spec("issue 10, F6: a directory that not everybody may enter")
def test_a_directory_that_appears(nm: NmDaemon, place: pathlib.Path) -> None:
    nm.put("running")
    (place / "private").mkdir(mode=0o750)
    make(place / "private/file", 0o644)
    nm.put("later")
    for name in ("running", "later"):
        out = nm.ssh(
            name,
            f"(ls {place}/private; cat {place}/private/file; find {place}; tar cf - {place}) 2>&1",
            check=False,
        )
        assert SECRET not in out
        assert "private/file\n" not in out.replace(f"cat: {place}/private/file", "")


@pytest.mark.spec(
    "issue 10, F6: a file that was public and is so no longer, and one that takes the place of a "
    "public one"
)
def test_changes_of_mode(nm: NmDaemon, place: pathlib.Path) -> None:
    make(place / "one", 0o644, "public\n")
    make(place / "two", 0o644, "public\n")
    nm.put("alpha")
    assert nm.ssh("alpha", f"cat {place}/one {place}/two") == "public\npublic\n"
    (place / "one").chmod(0o600)
    (place / "one").write_text(SECRET)
    make(place / "new", 0o600)
    (place / "new").replace(place / "two")
    assert SECRET not in nm.ssh("alpha", f"cat {place}/one {place}/two; true", check=False)
    assert SECRET not in nm.ssh(
        "alpha", f"cp -a {place} /root/all; cat /root/all/*; true", check=False
    )
    (place / "one").write_text("public again\n")
    (place / "one").chmod(0o644)
    assert nm.ssh("alpha", f"cat {place}/one") == "public again\n"


@pytest.mark.spec(
    "issue 10, F6: the rest works as before: programs with the bit of their owner, changes and "
    "removals inside"
)
def test_what_is_public_works(nm: NmDaemon) -> None:
    nm.put("alpha")
    out = nm.ssh(
        "alpha",
        "set -e; stat -c '%u %a' /usr/bin/env /usr/bin/su; useradd -m joe; su joe -c 'id -un; cat "
        "/usr/bin/env "
        "| head -c 4 | tail -c 3; echo'; echo x >> /usr/share/mine; rm /usr/bin/env; ! ls "
        "/usr/bin/env 2>/dev/null; "
        "mv /usr/bin/yes /usr/bin/yes2; yes2 | head -1; chmod 4755 /usr/bin/id; stat -c %a "
        "/usr/bin/id; "
        "rm -r /usr/share/man; ls /usr/share/man 2>/dev/null || echo gone; "
        "cp -a /usr/share/perl-openssl-defaults /usr/share/c 2>/dev/null || true; python3 -c "
        "'print(1)'",
    )
    assert out.splitlines() == ["0 755", "0 4755", "joe", "ELF", "y", "4755", "gone", "1"]
    if os.path.exists("/usr/bin/sudo"):
        assert (
            nm.ssh(
                "alpha",
                "echo 'joe ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/joe; su joe -c 'sudo -n id "
                "-u'",
            )
            == "0\n"
        )
