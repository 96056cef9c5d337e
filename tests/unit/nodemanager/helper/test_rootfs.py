"""Root trees: hostile tar files, templates and their users, what of the host is copied; the
filter of system calls.
"""

from __future__ import annotations

import errno
import gzip
import io
import math
import os
import pathlib
import shutil
import stat
import struct
import sys
import tarfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nodepool.nodemanager.backends.base import BackendError
from nodepool.nodemanager.client import privileges
from nodepool.nodemanager.confinement import seccomp, system_calls
from nodepool.nodemanager.records import records
from nodepool.nodemanager.rootfs import host_image, tar_image
from nodepool.nodemanager.rootfs import ssh_files as sshfiles
from nodepool.nodemanager.rootfs.tar_image import Limits, TarError, extract
from nodepool.nodemanager.rootfs.templates import RootStore, check_sliver_name
from nodepool.nodemanager.rootfs.trees import Trees
from tests.support.nodemanager.images import templates

Make = Callable[[pathlib.Path], list[tuple[tarfile.TarInfo, bytes]]]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="owners can only be kept by root")


def member(name: str, content: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    info.mode = 0o644
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


def archive(
    path: pathlib.Path, *members: tuple[tarfile.TarInfo, bytes], mode: str = "w"
) -> pathlib.Path:
    with tarfile.open(path, mode) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return path


def directory(name: str, mode: int = 0o755) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.DIRTYPE, mode=mode)


def link(name: str, target: str, hard: bool = False) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.LNKTYPE if hard else tarfile.SYMTYPE, linkname=target)


@pytest.fixture
def target(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("host")
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def untouched(target: pathlib.Path) -> None:
    assert sorted(os.listdir(target.parent / "outside")) == ["file"]
    assert (target.parent / "outside/file").read_text() == "host"


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
def test_archive_is_extracted_with_links_modes_and_times(
    target: pathlib.Path, tmp_path: pathlib.Path, mode: str
) -> None:
    extract(
        archive(
            tmp_path / "x.tar",
            directory("./"),
            directory("./usr/"),
            directory("usr/bin"),
            member("usr/bin/tool", b"x" * 5000, mode=0o4755),
            link("bin", "usr/bin"),
            member("bin/more", b"y"),
            link("abs", "/etc/alternatives/x"),
            link("hard", "usr/bin/tool", True),
            member("deep/without/parents", b"z", mtime=1234),
            member("pipe", type=tarfile.FIFOTYPE),
            directory("tmp", 0o1777),
            member("hole", b"\0" * (3 << 20)),
            mode=mode,
        ),
        target,
    )
    assert stat.S_IMODE((target / "usr/bin/tool").stat().st_mode) == 0o4755
    assert (target / "usr/bin/more").read_text() == "y"
    assert os.readlink(target / "abs") == "/etc/alternatives/x"
    assert (target / "hard").stat().st_ino == (target / "usr/bin/tool").stat().st_ino
    assert (target / "deep/without/parents").stat().st_mtime == 1234
    assert stat.S_ISFIFO((target / "pipe").stat().st_mode)
    assert stat.S_IMODE((target / "tmp").stat().st_mode) == 0o1777
    assert (target / "hole").stat().st_size == 3 << 20


@needs_root
def test_owners_are_kept(target: pathlib.Path, tmp_path: pathlib.Path) -> None:
    extract(
        archive(
            tmp_path / "x.tar",
            member("a", b"1", uid=33, gid=44),
            member("l", type=tarfile.SYMTYPE, linkname="a", uid=7),
        ),
        target,
    )
    assert (
        (target / "a").stat().st_uid,
        (target / "a").stat().st_gid,
        (target / "l").lstat().st_uid,
    ) == (33, 44, 7)
    with pytest.raises(TarError, match="beyond 65535"):
        extract(archive(tmp_path / "y.tar", member("b", b"1", uid=70000)), target)


@pytest.mark.spec(
    "issue 4 security: tar images with absolute paths, '..', devices and hard links to outside"
)
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda out: [member("/etc/x", b"1")], "absolute path"),
        (lambda out: [member("../outside/x", b"1")], "'..' in its path"),
        (lambda out: [member("a/../../outside/x", b"1")], "'..' in its path"),
        (lambda out: [member("disk", type=tarfile.BLKTYPE, devmajor=254)], "device node"),
        (lambda out: [member("mem", type=tarfile.CHRTYPE, devmajor=1, devminor=1)], "device node"),
        (lambda out: [link("h", f"{out}/file", True)], "absolute path"),
        (lambda out: [link("h", "../outside/file", True)], "'..' in its path"),
        (lambda out: [link("h", "nothing/here", True)], "No such file"),
        (lambda out: [link("s", "/"), link("h", "s", True)], "not a regular file"),
        (lambda out: [member("odd", type=b"7x"[:1])], ""),
        (lambda out: [member("x" * 5000, b"1")], "impossible name"),
        (lambda out: [link("x", "y" * 5000)], "impossible target"),
    ],
)
def test_hostile_members_of_an_archive_are_refused(
    target: pathlib.Path, tmp_path: pathlib.Path, make: Make, text: str
) -> None:
    path = archive(tmp_path / "x.tar", *make(tmp_path / "outside"))
    if text:
        with pytest.raises(TarError, match=text):
            extract(path, target)
    else:
        extract(path, target)
    untouched(target)


@pytest.mark.spec("issue 4 security: links in a tar lead nowhere but into its own tree")
def test_links_stay_inside(target: pathlib.Path, tmp_path: pathlib.Path) -> None:
    outside = tmp_path / "outside"
    up = "../" * 30 + str(outside).lstrip("/")
    for name, goal in (("a", str(outside)), ("b", up)):
        path = archive(tmp_path / f"{name}.tar", link(name, goal), member(f"{name}/planted", b"1"))
        # The link's target does not exist below the root of the tree: refused, or made inside.
        with pytest.raises(TarError, match=r"exists|No such file"):
            extract(path, target)
        untouched(target)
    (target / "etc").mkdir()
    extract(archive(tmp_path / "c.tar", link("c", "/etc"), member("c/inside", b"1")), target)
    assert (target / "etc/inside").read_text() == "1"
    # A file in place of a link: the link goes, what it led to stays.
    extract(
        archive(tmp_path / "d.tar", link("d", str(outside / "file")), member("d", b"mine")), target
    )
    assert (target / "d").read_text() == "mine"
    assert not (target / "d").is_symlink()
    extract(archive(tmp_path / "e.tar", link("e", str(outside)), directory("e", 0o777)), target)
    untouched(target)
    assert stat.S_IMODE(outside.stat().st_mode) != 0o777


def test_device_nodes_below_dev_are_skipped(target: pathlib.Path, tmp_path: pathlib.Path) -> None:
    extract(
        archive(
            tmp_path / "x.tar",
            directory("dev"),
            member("dev/sda", type=tarfile.BLKTYPE, devmajor=8),
            member("./dev/null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
            link("dev/fd", "/proc/self/fd"),
        ),
        target,
    )
    assert os.listdir(target / "dev") == []


@pytest.mark.parametrize(
    ("limits", "text"),
    [(Limits(size=1000), "larger than 1000 bytes"), (Limits(members=2), "more than 2 members")],
)
def test_archive_beyond_its_limits_is_refused(
    target: pathlib.Path, tmp_path: pathlib.Path, limits: Limits, text: str
) -> None:
    path = archive(
        tmp_path / "x.tar.gz", *(member(f"f{n}", b"\0" * 400) for n in range(3)), mode="w:gz"
    )
    with pytest.raises(TarError, match=text):
        extract(path, target, limits)


def test_damaged_archives_are_refused(target: pathlib.Path, tmp_path: pathlib.Path) -> None:
    whole = archive(
        tmp_path / "x.tar.gz", *(member(f"f{n}", os.urandom(40000)) for n in range(3)), mode="w:gz"
    ).read_bytes()
    plain = archive(tmp_path / "y.tar", member("f", os.urandom(40000))).read_bytes()
    for content in (
        b"",
        b"no tar at all",
        whole[:50000],
        whole[:100] + b"\xff" * 50 + whole[150:],
        plain[:20000],
    ):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(TarError):
            extract(tmp_path / "bad", target)


# --- templates
# --------------------------------------------------------------------------------------------------


def image(path: pathlib.Path, extra: bytes = b"") -> pathlib.Path:
    return archive(
        path,
        *(directory(name) for name in ("bin", "proc", "sys", "dev", "run")),
        member("bin/sh", b"#!" + extra, mode=0o755),
    )


def test_template_is_shared_and_goes_when_unused(tmp_path: pathlib.Path) -> None:
    store = RootStore(tmp_path / "state", lambda: sys.maxsize)
    path = image(tmp_path / "i.tar")
    first, second = store.tree(f"tar:{path}", "s1"), store.tree(f"tar:{path}", "s2")
    assert first == second
    assert (pathlib.Path(first.layers["root"][0]) / "bin/sh").exists()
    assert templates(store) == {first.key: ["s1", "s2"]}
    store.release("s1")
    assert store.prune({"s2"}) == []
    store.release("s2")
    assert store.prune(set(), idle=3600) == []
    assert store.prune(set()) == [first.key]
    assert templates(store) == {}


def test_tree_larger_than_the_free_space_is_refused(tmp_path: pathlib.Path) -> None:
    rooms = iter([3, 1 << 20])
    store, path = (
        RootStore(tmp_path / "state", lambda: next(rooms)),
        image(tmp_path / "i.tar", b"xx"),
    )
    with pytest.raises(BackendError, match="larger than 3 bytes"):
        store.tree(f"tar:{path}", "s1")
    assert templates(store) == {}
    assert store.tree(f"tar:{path}", "s1").key


def test_users_that_no_longer_exist_do_not_hold_a_template(tmp_path: pathlib.Path) -> None:
    store = RootStore(tmp_path / "state", lambda: sys.maxsize)
    tree = store.tree(f"tar:{image(tmp_path / 'i.tar')}", "lost")
    assert store.prune({"other"}) == [tree.key]


@pytest.mark.spec("issue 10, F3a: who is not known yet because it has just come keeps its tree")
def test_a_user_that_comes_meanwhile(tmp_path: pathlib.Path) -> None:
    store, source = RootStore(tmp_path / "state", lambda: sys.maxsize), image(tmp_path / "i.tar")
    asked = time.time() - 1
    tree = store.tree(f"tar:{source}", "new")
    assert store.prune(set(), asked=asked) == []
    assert templates(store) == {tree.key: ["new"]}
    assert store.prune(set()) == [tree.key]
    assert [name for name in os.listdir(store.directory) if name.endswith(".lock")] == []


@pytest.mark.spec(
    "issue 10, F3a: a tree that is being built holds up nobody who wants another one, and is not "
    "pruned"
)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_lock_per_tree(tmp_path: pathlib.Path, elsewhere: bool) -> None:
    store, source = RootStore(tmp_path / "state", lambda: sys.maxsize), image(tmp_path / "i.tar")
    ready = store.tree(f"tar:{source}", "s1")
    building, go = threading.Event(), threading.Event()

    def build(target: pathlib.Path) -> None:
        (target / "root").mkdir()
        for name in ("bin", "proc", "sys", "dev", "run"):
            (target / "root" / name).mkdir()
        (target / "root/bin/sh").touch()
        building.set()
        assert go.wait(20)

    with ThreadPoolExecutor(2) as threads:
        try:
            first = threads.submit(store.made, "slow", build, "s2", "image slow")
            assert building.wait(10)
            other = RootStore(tmp_path / "state", lambda: sys.maxsize) if elsewhere else store
            assert other.tree(f"tar:{source}", "s3").key == ready.key
            assert other.prune({"s1", "s3"}) == []
            # Who wants the same one waits for it, and it is built once.
            second = threads.submit(other.made, "slow", build, "s4", "image slow")
            assert not first.done()
            assert not second.done()
        finally:
            go.set()
        assert first.result(10) == second.result(10)
    assert templates(store) == {ready.key: ["s1", "s3"], "slow": ["s2", "s4"]}


def test_changed_tar_is_a_new_template(tmp_path: pathlib.Path) -> None:
    store = RootStore(tmp_path / "state", lambda: sys.maxsize)
    first = store.tree(f"tar:{image(tmp_path / 'i.tar')}", "s1")
    time.sleep(0.01)
    second = store.tree(f"tar:{image(tmp_path / 'i.tar', b'new')}", "s2")
    assert first.key != second.key
    assert store.tree(f"tar:{tmp_path / 'i.tar'}", "s3").key == second.key
    replaced = tmp_path / "replaced.tar"
    shutil.copy2(tmp_path / "i.tar", replaced)
    replaced.rename(tmp_path / "i.tar")
    assert store.tree(f"tar:{tmp_path / 'i.tar'}", "s4").key not in (first.key, second.key), (
        "another file of same size and time"
    )


def test_half_built_template_is_built_again(tmp_path: pathlib.Path) -> None:
    store = RootStore(tmp_path / "state", lambda: sys.maxsize)
    path = image(tmp_path / "i.tar")
    key = store.tree(f"tar:{path}", "s1").key
    done = tmp_path / "state/templates" / key
    done.rename(done.with_name(f"{key}.new"))
    (done.with_name(f"{key}.new") / "root/bin/sh").unlink()
    assert (pathlib.Path(store.tree(f"tar:{path}", "s1").layers["root"][0]) / "bin/sh").exists()
    (tmp_path / "state/templates/tar-dead.new").mkdir()
    (tmp_path / "state/templates/tar-gone.old").mkdir()
    assert store.prune({"s1"}) == ["tar-dead.new", "tar-gone.old"]
    assert sorted(p.name for p in (tmp_path / "state/templates").iterdir() if p.is_dir()) == [key]


def test_failed_extraction_leaves_no_template(tmp_path: pathlib.Path) -> None:
    store = RootStore(tmp_path / "state", lambda: sys.maxsize)
    bad = archive(tmp_path / "bad.tar", directory("bin"), member("bin/sh"), member("../x"))
    no_shell = archive(tmp_path / "empty.tar", directory("etc"))
    for path, text in ((bad, "'..' in its path"), (no_shell, "no /bin/sh")):
        with pytest.raises(BackendError, match=text):
            store.tree(f"tar:{path}", "s1")
    assert [p for p in (tmp_path / "state/templates").iterdir() if p.is_dir()] == []


@pytest.mark.parametrize("name", ["", "A", "1a", "a/b", "..", "a\n", "a" * 64, "a b", "é"])
def test_invalid_sliver_names_are_refused(name: str) -> None:
    with pytest.raises(BackendError):
        check_sliver_name(name)


def test_valid_sliver_names_are_accepted() -> None:
    for name in ("a", "princeton_sirius", "np0000000123", "a-b", "a" * 63):
        assert check_sliver_name(name) == name


# --- the host's image
# --------------------------------------------------------------------------------------------------


@pytest.mark.spec("NM-C.2: allow-list copy only")
def test_copies_only_what_is_public(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "source"
    (source / "closed").mkdir(parents=True)
    (source / "public").write_text("1")
    (source / "private").write_text("2")
    (source / "private").chmod(0o640)
    (source / "closed/file").write_text("3")
    (source / "closed").chmod(0o700)
    (source / "link").symlink_to("/etc/shadow")
    os.mkfifo(source / "pipe")
    (source / "proxy").write_text('Acquire::http::Proxy "http://me:geheim@proxy:3128";')
    (source / "setuid").write_text("4")
    (source / "setuid").chmod(0o4755)
    host_image.copy_public(source, tmp_path / "target", without_credentials=True)
    assert sorted(os.listdir(tmp_path / "target")) == ["link", "public", "setuid"]
    assert (tmp_path / "target/link").is_symlink()
    assert stat.S_IMODE((tmp_path / "target/setuid").stat().st_mode) == 0o755


@needs_root
@pytest.mark.spec("NM-C.2: host image: freshly built /etc, never shadow, keys, home directories")
def test_host_image_contains_no_secrets(tmp_path: pathlib.Path) -> None:
    host_image.build(tmp_path)
    etc = tmp_path / "root/etc"
    users = [line.split(":") for line in (etc / "passwd").read_text().splitlines()]
    assert all(int(user[2]) < 1000 or user[2] == "65534" for user in users)
    assert {"root", "sshd"} <= {user[0] for user in users}
    assert {line.split(":")[1] for line in (etc / "shadow").read_text().splitlines()} == {"*"}
    assert stat.S_IMODE((etc / "shadow").stat().st_mode) == 0o640
    assert list((etc / "ssh").glob("ssh_host*")) == []
    assert not (etc / "ssh/sshd_config").exists()
    assert sorted(os.listdir(tmp_path / "root/root")) == [".bashrc", ".profile"]
    assert os.listdir(tmp_path / "root/home") == []
    assert stat.S_ISCHR((tmp_path / "mask/local/etc").stat().st_mode)


@needs_root
def test_mask_hides_what_not_everybody_may_read(tmp_path: pathlib.Path) -> None:
    usr = tmp_path / "usr"
    for name in ("bin", "share/secret", "local/etc"):
        (usr / name).mkdir(parents=True)
    (usr / "bin/tool").write_text("1")
    (usr / "bin/key").write_text("2")
    (usr / "bin/key").chmod(0o600)
    (usr / "bin/run-only").write_text("3")
    (usr / "bin/run-only").chmod(0o4711)
    (usr / "share/secret").chmod(0o700)
    (usr / "bin").chmod(0o775)
    (usr / "by-name").mkdir()
    (usr / "by-name").chmod(0o751)
    host_image.build_mask(usr, tmp_path / "mask")
    mask = tmp_path / "mask"
    found = {
        str(path.relative_to(mask))
        for path in mask.rglob("*")
        if stat.S_ISCHR(path.lstat().st_mode)
    }
    assert found == {"bin/key", "bin/run-only", "by-name", "share/secret", "local/etc"}
    assert stat.S_IMODE((tmp_path / "mask/bin").stat().st_mode) == 0o775


def test_host_keys_differ() -> None:
    private, public = sshfiles.new_host_key()
    assert private.startswith(b"-----BEGIN OPENSSH PRIVATE KEY-----")
    assert public.startswith("ssh-ed25519 ")
    assert sshfiles.new_host_key()[1] != public
    for line in (
        "PasswordAuthentication no",
        "PermitRootLogin prohibit-password",
        "UsePAM no",
        "KbdInteractiveAuthentication no",
    ):
        assert line in sshfiles.CONFIG.splitlines()


# --- the filter of system calls
# ------------------------------------------------------------------------------------------

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW = 0x7FFF0000


def decide(
    machine: str,
    number: int,
    *arguments: int,
    architecture: int | None = None,
    given: tuple[str, ...] = (),
) -> int:
    """What the kernel would make of the filter: 0 for allowed, else the error number (-1:
    success without effect).
    """
    program = seccomp.build(machine, frozenset(given))
    values = list(arguments) + [0] * (6 - len(arguments))
    data = struct.pack("=iIQ6Q", number, architecture or ARCHITECTURES[machine], 0, *values)
    place, register = 0, 0
    while True:
        code, yes, no, value = struct.unpack_from("=HBBI", program, place * 8)
        place += 1
        if code == 0x20:
            register = struct.unpack_from("=I", data, value)[0]
        elif code == 0x54:
            register &= value
        elif code == 0x06:
            return 0 if value == ALLOW else (value & 0xFFFF) or -1
        else:
            hit = {
                0x15: register == value,
                0x25: register > value,
                0x35: register >= value,
                0x45: bool(register & value),
            }[code]
            place += yes if hit else no


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.spec("issue 10, 3: seccomp lists written as allow-lists; NM-C.2: seccomp by default")
def test_only_listed_system_calls_are_allowed(machine: str) -> None:
    column = list(ARCHITECTURES).index(machine)
    named = {
        name: numbers[column]
        for group in system_calls.ALLOWED.values()
        for name, numbers in group.items()
    }
    checked = {
        "clone",
        "unshare",
        "socket",
        "socketpair",
        "setsockopt",
        "ioctl",
        "personality",
        "prctl",
        "seccomp",
    }
    let_through = {
        number for name, number in named.items() if number is not None and name not in checked
    }
    for number in let_through:
        assert decide(machine, number) == 0
    forbidden = {numbers[column] for numbers in system_calls.FORBIDDEN.values()} - {None}
    special = {named[name] for name in checked} | {system_calls.WITHOUT_EFFECT["sync"][column]}
    for number in range(600):
        if number not in let_through | special:
            assert decide(machine, number) == (1 if number in forbidden else 38), number
    assert decide(machine, system_calls.WITHOUT_EFFECT["sync"][column]) == -1
    assert decide(machine, 1, architecture=0x40000003) == 38
    if machine == "x86_64":
        assert decide(machine, 0x40000001) == 38
    assert len(seccomp.build(machine)) // 8 < 4096


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.spec("issue 10, 3: arguments that open what no job needs")
def test_filter_of_arguments(machine: str) -> None:
    column = list(ARCHITECTURES).index(machine)
    named = {
        name: numbers[column]
        for group in system_calls.ALLOWED.values()
        for name, numbers in group.items()
    }

    def answers(name: str, *calls: tuple[int, ...], given: tuple[str, ...] = ()) -> list[int]:
        number = named[name]
        assert number is not None
        return [decide(machine, number, *call, given=given) for call in calls]

    assert answers("clone", (17,), (0x01200011,), (0x20000011,), (0x10000011,), (0x00020011,)) == [
        0,
        0,
        1,
        1,
        1,
    ]
    assert answers("clone", (17,), (0x20000011,), (0x10000011,), given=("mount",)) == [0, 0, 1]
    assert answers("unshare", (0x200,), (0x20000,), (0x80,), (0x10000000,)) == [0, 1, 1, 1]
    assert answers("unshare", (0x20000,), (0x80,), (0x10000000,), given=("docker",)) == [0, 0, 1]
    assert (
        answers("socket", (1, 1, 0), (2, 1, 6), (2, 0x80802, 17), (10, 1, 0), (16, 3, 0)) == [0] * 5
    )
    assert (
        answers(
            "socket", (2, 1, 132), (2, 6, 33), (2, 2, 136), (2, 3, 255), (16, 3, 12), (16, 3, 16)
        )
        == [93] * 6
    )
    assert (
        answers("socket", (17, 3, 0), (0, 1, 0), (3, 1, 0), (38, 5, 0), (40, 1, 0), (44, 1, 0))
        == [97] * 6
    )
    assert answers("socket", (17, 3, 0), (2, 3, 255), (2, 0x80003, 89), given=("tcpdump",)) == [
        0,
        0,
        0,
    ]
    assert answers("socket", (2, 1, 132), given=("docker",)) == [93]
    assert answers("socket", (16, 3, 12), (16, 3, 16), given=("network-admin",)) == [0, 0]
    assert answers("socketpair", (1, 1, 0), (40, 1, 0)) == [0, 97]
    assert answers(
        "ioctl", (0, 0x5401), (0, 0x5412), (0, 0x541C), (0, 0x5423), (0, 0xFFFFFFFF00005412)
    ) == [0, 1, 1, 1, 1]
    assert answers("personality", (0,), (0xFFFFFFFF,), (0x0400000,), (0x8,)) == [0, 0, 1, 0]
    assert answers("seccomp", (1, 0), (1, 1), (1, 8), (1, 9), given=("seccomp",)) == [0, 0, 1, 1]
    assert answers("seccomp", (0, 0), (1, 0), (1, 8), (2, 0), (1 << 32 | 1, 0)) == [
        0,
        22,
        22,
        0,
        22,
    ]
    assert answers("prctl", (38, 1), (22, 1), (22, 2), (22, 2, 4096), (21, 2)) == [0, 0, 22, -1, 0]
    assert answers("prctl", (22, 2), (22, 2, 4096), given=("docker",)) == [0, 0]
    attach = [(0, 1, option) for option in (26, 50, 51, 52)]
    assert answers("setsockopt", *attach, (0, 1 << 32 | 1, 26)) == [1] * 5
    assert (
        answers("setsockopt", (0, 1, 27), (0, 1, 8), (0, 0, 26), (0, 6, 50), (0, 41, 26)) == [0] * 5
    )
    assert answers("setsockopt", *attach, given=("tcpdump",)) == [0] * 4
    assert answers("setsockopt", *attach, given=("seccomp",)) == [1] * 4


@pytest.mark.spec(
    "issue 10, 3: the capability sets are as small as real jobs allow; privileges are named"
)
def test_privileges_add_only_their_named_capabilities() -> None:
    assert sorted(privileges.capabilities(())) == [0, 1, 3, 4, 5, 6, 7, 10, 18]
    assert privileges.capabilities(("docker",)) == privileges.capabilities(
        ("apt", "mount", "network-admin", "tcpdump")
    ) | {8}
    assert privileges.capabilities(("ping",)) == privileges.capabilities(())
    assert privileges.check(["ping", "apt", "ping"]) == ["apt", "ping"]
    for wrong in ("ping", ["root"], [7], [["ping"]], None, {"ping": 1}):
        with pytest.raises(ValueError, match="apt, debug, docker"):
            privileges.check(wrong)
    with pytest.raises(
        records.RecordError, match="privileges: 'root' is not a privilege; known ones are apt"
    ):
        records.parse_record({"account_type": "sliver", "name": "a", "privileges": ["root"]})


def test_extraction_has_bounds_by_default() -> None:
    assert tar_image.Limits().size < 1 << 40
    assert tar_image.Limits().members < 10_000_000


def test_a_host_on_which_no_tree_can_be_created_reports_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever is missing, nobody waits for the tree for ever."""

    class Backend:
        class roots:
            @staticmethod
            def tree(image: str, sliver: str) -> None:
                raise OSError(errno.ENOSPC, "No space left on device", "/state/templates")

    trees = Trees(Backend(), lambda: None)  # type: ignore[arg-type]
    trees.prepare_host()
    assert trees.prepared
    assert (
        "Slivers of image host cannot be created: [Errno 28] No space left on device" in caplog.text
    )


def header(name: bytes, kind: bytes, size: int, fields: bytes = b"", extra: bytes = b"") -> bytes:
    """A header of GNU tar, whose checksum is right."""
    text = (
        name.ljust(100, b"\0")
        + b"0000644\0"
        + b"0000000\0" * 2
        + b"%011o\0" % size
        + b"00000000000\0"
        + b" " * 8
        + kind
    )
    block = bytearray(
        (text.ljust(257, b"\0") + b"ustar  \0").ljust(345, b"\0") + extra.ljust(167, b"\0")
    )
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + fields


def large_header(kind: bytes) -> Iterator[bytes]:
    """A header of 64 GiB; reading it into memory ends badly. What follows of it is never asked
    for.
    """
    yield header(b"x", kind, (8 << 30) - 1, b"1 a=b\n")


def sparse_map() -> Iterator[bytes]:
    """200,000 blocks of a map of holes: 4.2 million entries."""
    yield header(b"x", b"S", 0, extra=bytes(41) + bytes(96) + b"\1" + b"00000010000\0")
    block = bytes(504) + b"\1" + bytes(7)
    for _ in range(200):
        yield block * 1000


@pytest.mark.parametrize(
    "content",
    [
        lambda: large_header(b"x"),
        lambda: large_header(b"g"),
        lambda: large_header(b"L"),
        sparse_map,
    ],
    ids=["pax", "global", "name", "map"],
)
@pytest.mark.parametrize("opened", [open, gzip.open], ids=["plain", "gzip"])
def test_large_headers_are_refused_before_they_are_read(
    target: pathlib.Path,
    tmp_path: pathlib.Path,
    content: Callable[[], Iterator[bytes]],
    opened: Callable[..., Any],
) -> None:
    path = tmp_path / "bomb.tar"
    with opened(path, "wb") as file:
        for piece in content():
            file.write(piece)
    tracemalloc.start()
    try:
        with pytest.raises(TarError, match="headers of a member are larger"):
            extract(path, target)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_common_headers_are_limited(target: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.tar"
    with path.open("wb") as file:
        for number in range(5):
            text = b"%d=%s\n" % (number, b"v" * 300_000)
            record = b"%d %s" % (len(text) + 7, text)
            assert len(record) == len(text) + 7
            file.write(
                header(b"g", b"g", len(record), record.ljust(-(-len(record) // 512) * 512, b"\0"))
                + header(b"f", b"0", 0)
            )
    with pytest.raises(TarError, match="common headers"):
        extract(path, target)


def test_holes_are_skipped_not_read(target: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path, size = tmp_path / "x.tar", 40 << 30
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("hole")
        info.size = 5
        info.pax_headers = {"GNU.sparse.map": f"{size - 5},5", "GNU.sparse.size": str(size)}
        tar.addfile(info, io.BytesIO(b"hello"))
    begun = time.process_time()
    extract(path, target)
    assert time.process_time() - begun < 5  # reading 40 GiB of zeros takes 23 s
    found = target / "hole"
    assert found.stat().st_size == size and found.stat().st_blocks < 1000
    with found.open("rb") as file:
        file.seek(size - 6)
        assert file.read() == b"\0hello"


@pytest.mark.parametrize("holes", ["5,-1", "9,5", "3,2,0,1"])
def test_impossible_holes_are_refused(
    target: pathlib.Path, tmp_path: pathlib.Path, holes: str
) -> None:
    info, content = member(
        "hole", b"x" * 5, pax_headers={"GNU.sparse.map": holes, "GNU.sparse.size": "10"}
    )
    with pytest.raises(TarError, match="hole"):
        extract(archive(tmp_path / "x.tar", (info, content)), target)


@pytest.mark.parametrize("mtime", [1e300, math.nan, math.inf])
def test_impossible_time_names_the_member(
    target: pathlib.Path, tmp_path: pathlib.Path, mtime: float
) -> None:
    path = archive(tmp_path / "x.tar", member("odd", b"1", pax_headers={"mtime": str(mtime)}))
    with pytest.raises(TarError, match="member 'odd'"):
        extract(path, target)


def test_directories_and_empty_files_count(target: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = archive(tmp_path / "x.tar", *(member(f"{number}/" * 100 + "f") for number in range(3)))
    with pytest.raises(TarError, match="larger than 1000000 bytes"):
        extract(path, target, Limits(size=1_000_000))


def test_deep_paths_are_refused(target: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(TarError, match="more than 128 nested directories"):
        extract(archive(tmp_path / "x.tar", directory("a/" * 400)), target)
