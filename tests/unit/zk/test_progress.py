"""Records and mirror of build and upload progress, against a real ZooKeeper."""

from __future__ import annotations

import json
import logging
import math
import time

import pytest
from kazoo.exceptions import NoNodeError

from nodepool import status
from nodepool.base.problems import BUILDER_ENDED
from nodepool.cmd.commands.images.log import new_lines
from nodepool.status.results import format_bytes
from nodepool.zk.mirror import progress as module
from nodepool.zk.mirror.progress import (
    BuildProgress,
    ProgressStore,
    ProgressTree,
    UploadFailure,
    UploadProgress,
)
from nodepool.zk.records.progress import clean_line, clip_tail
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import wait_for

BUILD = "b" * 32


@pytest.fixture
def store(zk_chroot):
    return ProgressStore(zk_chroot.connect().client)


@pytest.fixture
def read(zk_chroot):
    """All records, read without a mirror."""
    return ZooKeeper(zk_chroot.connect(), enable_cache=False).readProgress


@pytest.fixture
def tree(zk_chroot):
    tree = ProgressTree(zk_chroot.connect())
    tree.start()
    assert tree.synced.wait(20)
    yield tree
    tree.stop()


def build(**values):
    return BuildProgress(
        **{
            "image": "noble",
            "build": BUILD,
            "builder": "nb01",
            "phase": "install",
            "started": 100.0,
            "formats": ["qcow2"],
            "sizes": {"qcow2": 4096},
            "tail": ["a", "b"],
            **values,
        }
    )


def upload(**values):
    return UploadProgress(
        **{
            "image": "noble",
            "build": BUILD,
            "provider": "cloud-a/b@c",
            "upload": "0000000001",
            "bytes_total": 40,
            **values,
        }
    )


# -- texts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m\x1b]0;title\x07 text\n", "red text"),
        ("10%\r50%\r100%\r\n", "100%"),
        ("a\x00b\x9bc\u2028d", "a b c d"),
        ("x" * 1000, "x" * 497 + "..."),
        ("bad \udcff", "bad ?"),
    ],
)
def test_lines_are_fit_for_a_terminal(text, expected):
    assert clean_line(text) == expected


def test_the_tail_is_bounded():
    assert clip_tail(str(n) for n in range(100)) == [str(n) for n in range(80, 100)]
    kept = clip_tail(["\N{SNOWMAN}" * 450] * 20)
    assert 0 < len(kept) < 20 and sum(len(line.encode()) + 1 for line in kept) <= 4096
    record = json.loads(
        build(tail=["y" * 5000] * 50, last_line="z" * 5000, reason="r" * 5000).serialize()
    )
    assert (
        len(json.dumps(record["tail"])) < 4500
        and len(record["last_line"]) == 500
        and len(record["reason"]) == 2000
    )


def test_fraction_and_elapsed():
    assert build(expected=100.0).fraction(150.0) == 0.5
    assert build(expected=100.0).fraction(900.0) == 0.99
    assert build(expected=None).fraction(150.0) is None
    assert build(expected=100.0, state="ready").fraction(150.0) == 1.0
    assert build(expected=100.0, state="failed").fraction(150.0) is None
    assert build().elapsed(130.0) == 30.0
    assert build(duration=7.0).elapsed(130.0) == 7.0
    assert build(state="failed", ended=104.0).elapsed(130.0) == 4.0
    assert build(state="failed").elapsed(130.0) is None


def test_helpers_format_short_texts():
    assert [format_bytes(n) for n in (5, 1024, 1.5 * 2**30, 2**60)] == [
        "5 B",
        "1.0 KiB",
        "1.5 GiB",
        "1048576.0 TiB",
    ]
    assert new_lines(["a", "b", "c"], ["b", "c", "d"]) == (["d"], False)
    assert new_lines(["a"], ["x"]) == (["x"], True)
    assert new_lines([], ["x"]) == (["x"], False)
    assert new_lines(["a"], ["a"]) == ([], False)


# -- records


def test_progress_records_survive_serialization():
    record = build(
        exit_code=0,
        expected=12.5,
        next_try=9.0,
        manual=True,
        reason="because",
        last_line="b",
        log="/l",
    )
    assert BuildProgress.fromDict(json.loads(record.serialize()), BUILD) == record
    sent = upload(started=1.0, builder="nb", attempt=3)
    assert (
        UploadProgress.fromDict(json.loads(sent.serialize()), sent.path.rsplit("/", 1)[1]) == sent
    )
    failed = UploadFailure("no@ble", "p/q@r", BUILD, "0000000002", "quota", 5.0, 2, 65.0)
    assert (
        UploadFailure.fromDict(json.loads(failed.serialize()), failed.path.rsplit("/", 1)[1])
        == failed
    )


def test_fields_of_the_record():
    assert list(json.loads(build().serialize())) == [
        "image",
        "build",
        "builder",
        "builder_id",
        "state",
        "reason",
        "exit_code",
        "phase",
        "started",
        "updated",
        "ended",
        "expected",
        "duration",
        "log",
        "last_line",
        "tail",
        "formats",
        "sizes",
        "next_try",
        "manual",
    ]


def test_infinite_numbers_are_skipped():
    assert json.loads(upload(started=math.inf).serialize())["started"] is None
    assert json.loads(build(expected=math.nan).serialize())["expected"] is None


def test_parsing_is_total():
    odd = {
        "image": "noble",
        "state": "building",
        "reason": 5,
        "exit_code": "x",
        "started": True,
        "tail": [1, "a"],
        "sizes": {"qcow2": "big", "raw": 2.0},
        "formats": "qcow2",
        "manual": "yes",
        "expected": 1e400,
        "new": {},
    }
    record = BuildProgress.fromDict(odd, BUILD)
    assert (record.reason, record.exit_code, record.started, record.tail) == (
        None,
        None,
        None,
        ["a"],
    )
    assert (record.sizes, record.formats, record.manual, record.expected) == (
        {"raw": 2},
        [],
        False,
        None,
    )
    assert UploadProgress.fromDict({"image": "i", "attempt": None}, "b-p-1").attempt == 1
    assert UploadFailure.fromDict({}, "i@p").reason == ""


# -- store


def test_a_missing_tree_reads_as_empty(store, read):
    assert store.read_build("x") is None
    store.delete(BuildProgress("", "x"))
    store.delete(upload())
    store.delete(UploadFailure("i", "p"))
    assert read() == module.ProgressData()


def test_writing_and_deleting(store, read):
    store.write(build())
    store.write(build(phase="finalise"))
    assert store.read_build(BUILD).phase == "finalise"
    assert list(read().builds) == [BUILD]
    store.write(upload())
    store.write(upload(bytes_total=20))
    assert [(p.provider, p.bytes_total) for p in read().uploads.values()] == [("cloud-a/b@c", 20)]
    failure = UploadFailure("noble", "cloud-a/b@c", BUILD, "0000000001", "quota")
    store.write(failure)
    assert list(read().failures.values()) == [failure]
    store.delete(BuildProgress("", BUILD))
    store.delete(upload())
    store.delete(UploadFailure("noble", "cloud-a/b@c"))
    assert read() == module.ProgressData()


def test_broken_records_are_skipped(store, read, caplog):
    for name, data in (("x", b"{"), ("y", b"[]"), ("z", b"{}"), ("empty", b"")):
        store._kazoo.create(f"{module.BUILDS}/{name}", data, makepath=True)
    store._kazoo.create(f"{module.UPLOADS}/nonsense", b"{}", makepath=True)
    store.write(build())
    with caplog.at_level(logging.ERROR):
        data = read()
    assert list(data.builds) == [BUILD] and not data.uploads
    assert len([r for r in caplog.records if "Ignoring" in r.message]) == 4


def test_nothing_is_written_into_the_tree_of_old(store):
    store.write(build())
    store.write(upload())
    store.write(UploadFailure("noble", "p"))
    assert store._kazoo.get_children("/nodepool") == ["image-progress"]
    assert sorted(store._kazoo.get_children(module.ROOT)) == ["builds", "failed-uploads", "uploads"]


def test_an_upload_ends_with_the_session_and_is_made_again(zk_chroot, store, read):
    other = zk_chroot.connect()
    ProgressStore(other.client).write(upload(bytes_total=1))
    # The same upload, continuing in a new session: the record of the old one would vanish with that
    # session.
    store.write(upload(bytes_total=2))
    other.disconnect()
    assert [p.bytes_total for p in read().uploads.values()] == [2]
    mine = zk_chroot.connect()
    ProgressStore(mine.client).write(upload(upload="0000000002"))
    assert len(read().uploads) == 2
    mine.disconnect()
    wait_for(lambda: len(read().uploads) == 1, what="the end of the other session's record")


# -- mirror


def test_the_mirror_follows(tree, store):
    changes = []
    tree.listeners.append(changes.append)
    store.write(build())
    store.write(upload())
    store.write(UploadFailure("noble", "p@q", reason="quota"))
    wait_for(
        lambda: tree.data().builds and tree.data().uploads and tree.data().failures,
        what="the records",
    )
    assert tree.data().uploads[(BUILD, "cloud-a/b@c", "0000000001")].bytes_total == 40
    assert tree.data().failures[("noble", "p@q")].reason == "quota"
    store.write(build(phase="finalise"))
    wait_for(lambda: tree.data().builds[BUILD].phase == "finalise", what="the change")
    assert set(changes) == {"noble"}
    store.delete(BuildProgress("", BUILD))
    store.delete(upload())
    store.delete(UploadFailure("noble", "p@q"))
    wait_for(lambda: tree.data() == module.ProgressData(), what="the end of the records")
    assert tree.data() == module.ProgressData()


def test_the_mirror_reads_what_was_there_and_nothing_twice(zk_chroot, store):
    store.write(build())
    store.write(UploadFailure("noble", "p"))
    tree = ProgressTree(zk_chroot.connect())
    tree.start()
    assert tree.synced.wait(20)
    assert set(tree.data().builds) == {BUILD} and set(tree.data().failures) == {("noble", "p")}
    reads = tree.reads
    store.read_build(BUILD)
    store._kazoo.sync("/")
    assert tree.reads == reads
    tree.stop()


def test_broken_data_in_the_mirror(tree, store, caplog):
    store.write(build())
    wait_for(lambda: tree.data().builds, what="the record")
    store._kazoo.set(build().path, b"{")
    wait_for(lambda: not tree.data().builds, what="the end of the record")
    assert list(tree.bad) == [build().path] and caplog.text.count("Ignoring") == 1
    store.write(build())
    wait_for(lambda: tree.data().builds, what="the record")
    assert not tree.bad


def test_another_name_for_one_build_harms_no_record(zk_chroot, tree, store):
    """``%62`` is another way to write ``b``: neither its arrival nor its removal concerns the
    good record.
    """
    store.write(build())
    other = build().path.replace("b" * 32, "%62" + "b" * 31)
    store._kazoo.create(other, build(phase="other").serialize())
    wait_for(lambda: other in tree.bad, what="the refused record")
    assert tree.data().builds[BUILD].phase == "install"
    second = ProgressTree(zk_chroot.connect())
    second.start()
    assert second.synced.wait(20)
    assert second.data().builds == tree.data().builds
    second.stop()
    store._kazoo.delete(other)
    wait_for(lambda: not tree.bad, what="the end of the refused record")
    assert tree.data().builds[BUILD].phase == "install"


def test_facade_reads_progress_with_and_without_mirror(zk_chroot, zk):
    assert zk.readProgress() == module.ProgressData()
    zk.progress.write(build())
    wait_for(lambda: zk.readProgress().builds, what="the mirror")
    plain = ZooKeeper(zk_chroot.connect(), enable_cache=False)
    assert plain.readProgress() == zk.readProgress()
    with pytest.raises(NoNodeError):
        zk.kazoo_client.get(f"/nodepool/images/{BUILD}")


# -- rows


def test_rows_of_progress(store, zk_chroot):
    zk = ZooKeeper(zk_chroot.connect(), enable_cache=False)
    now = time.time()
    store.write(build(started=now - 60, expected=120.0, last_line="unpacking"))
    store.write(
        build(
            build="f" * 32,
            state="failed",
            reason="no space",
            exit_code=1,
            duration=5.0,
            next_try=now + 60,
        )
    )
    store.write(upload(started=now - 8))
    store.write(UploadFailure("noble", "p", BUILD, "0000000009", "quota", now, 2, now + 30))
    rows = status.image_progress(zk, clock=lambda: now).rows
    assert rows[0]["reason"] == BUILDER_ENDED, "nobody holds the lock"
    zk.kazoo_client.ensure_path("/nodepool/images/noble/builds")
    with zk.imageBuildLock("noble", blocking=False):
        rows = status.image_progress(zk, clock=lambda: now).rows
        assert [(row["kind"], row["state"]) for row in rows] == [
            ("build", "building"),
            ("build", "failed"),
            ("upload", "uploading"),
            ("upload", "failed"),
        ]
        assert (rows[0]["elapsed"], rows[0]["expected"], rows[0]["progress"]) == (60, 120, 0.5)
        assert (rows[1]["reason"], rows[1]["exit_code"], rows[1]["next_try"]) == (
            "no space",
            1,
            int(now + 60),
        )
        assert (rows[2]["bytes_total"], rows[2]["elapsed"]) == (40, 8)
        assert rows[3]["reason"] == "quota"
        assert all(set(row) == {*status.PROGRESS_COLUMNS, "log"} for row in rows)
        text = status.output(
            status.image_progress(zk, clock=lambda: now), "table", clock=lambda: now
        )
        assert "00:00:01:00" in status.output(status.image_progress(zk, clock=lambda: now), "csv")
        assert "| 1 min " in text and "50%" in text and "40 B" in text
        for form in ("json", "yaml", "csv"):
            assert "no space" in status.output(status.image_progress(zk), form)
