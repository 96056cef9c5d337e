"""Image listings of the web interface over a live mirror of a real ZooKeeper; the tests write
what a builder would.
"""

from __future__ import annotations

import json
import time
import urllib.request

import pytest

from nodepool import metrics
from nodepool.status.explain import explain
from nodepool.web.server import WebApp
from nodepool.zk import reports
from nodepool.zk import zookeeper as zk_module
from nodepool.zk.history import HistoryReader
from nodepool.zk.mirror.progress import BuildProgress, ProgressStore, UploadFailure, UploadProgress
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import wait_for
from tests.integration.cli.test_commands import make_build, make_upload

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"
IMAGE = "fake-image"
BUILD_KEYS = ["id", "image", "builder", "formats", "state", "age"]
UPLOAD_KEYS = [
    "id",
    "upload_id",
    "provider",
    "image",
    "external_name",
    "external_id",
    "state",
    "age",
]


class Launcher:
    """What the web server needs of a launcher."""

    feed = None

    def __init__(self, zk):
        self.zk = zk

    def getReadiness(self):
        return True, []

    def getZK(self):
        return self.zk


@pytest.fixture
def get(zk):
    webapp = WebApp(Launcher(zk), port=0, listen_address="127.0.0.1", statistics=metrics.Metrics())
    webapp.start()
    port = webapp.server.socket.getsockname()[1]

    def get(path, accept="application/json"):
        webapp.cache.cache.clear()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", headers={"Accept": accept}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            body = answer.read().decode()
            if accept == "application/json":
                assert answer.headers["Content-Type"] == "application/json"
                return json.loads(body)
            assert answer.headers["Content-Type"] == "text/plain; charset=UTF-8"
            return body

    yield get
    webapp.stop()
    webapp.join(5)


@pytest.fixture
def other(zk_chroot):
    """The builder's connection: another session than the mirror's."""
    return ZooKeeper(zk_chroot.connect(), enable_cache=False)


@pytest.fixture
def upload(zk, other):
    """A ready build with a ready upload, shown."""
    build = make_build(other)
    number = make_upload(other, build)
    wait_for(lambda: zk.image_tree.data().uploads, what="the upload in the mirror")
    return build, number


@pytest.mark.spec(
    "CLI-9: browser-like Accept, and text/plain: Content-Type, body contains the image name"
)
@pytest.mark.parametrize("accept", [BROWSER, "text/plain"])
def test_image_lists_are_text_by_default(get, upload, accept):
    for path in ("/image-list", "/dib-image-list"):
        assert IMAGE in get(path, accept)


@pytest.mark.spec("CLI-9: fields=id,image,state on /image-list")
def test_fields_select_columns_of_the_image_list(get, upload):
    assert f"| {upload[0]} | {IMAGE} | ready |" in get(
        "/image-list?fields=id,image,state", "text/plain"
    )


@pytest.mark.spec("CLI-9: JSON of /image-list and /dib-image-list")
def test_image_lists_are_available_as_json(get, upload):
    build, number = upload
    row = get("/image-list")[0]
    assert (row["id"], row["upload_id"], row["image"], row["provider"], row["state"]) == (
        build,
        number,
        IMAGE,
        "p",
        "ready",
    )
    assert list(row)[:8] == UPLOAD_KEYS and isinstance(row["age"], int)
    row = get("/dib-image-list")[0]
    assert (row["id"], row["formats"], row["state"]) == (f"{IMAGE}-{build}", ["qcow2"], "ready")
    assert list(row)[:6] == BUILD_KEYS and isinstance(row["age"], int)


@pytest.mark.spec("CLI-6.5: state in /dib-image-list is paused for builds of a paused image")
def test_builds_of_a_paused_image_are_shown_as_paused(get, zk, other, upload):
    other.setImagePaused(IMAGE, True)
    wait_for(lambda: zk.image_tree.data().paused, what="the pause in the mirror")
    assert get("/dib-image-list")[0]["state"] == "paused"
    other.setImagePaused(IMAGE, False)
    wait_for(lambda: not zk.image_tree.data().paused, what="the end of the pause in the mirror")
    assert get("/dib-image-list")[0]["state"] == "ready"


@pytest.mark.spec(
    "CLI-9: /image-status: null, after a request pending, while the build lock is held building"
)
def test_image_status_shows_pending_and_building_requests(get, zk, other, upload):
    def shown():
        row = get("/image-status")[0]
        return row["paused"], row["build_request"]

    assert shown() == (False, None)
    other.submitBuildRequest(IMAGE)
    wait_for(lambda: zk.image_tree.data().requests, what="the request in the mirror")
    assert shown() == (False, "pending")
    with other.imageBuildLock(IMAGE, blocking=False):
        make_build(other, state="building")
        wait_for(lambda: shown() == (False, "building"), what="building")
    wait_for(lambda: shown() == (False, "pending"), what="pending again")
    other.removeBuildRequest(IMAGE)
    wait_for(lambda: shown() == (False, None), what="the end of the request")


@pytest.mark.spec("CLI-9: changes made by a builder started after the launcher show up")
def test_a_later_builder_shows_up(get, other):
    assert get("/dib-image-list") == [] == get("/image-list") == get("/image-progress")
    build = make_build(other)
    wait_for(
        lambda: [r["id"] for r in get("/dib-image-list")] == [f"{IMAGE}-{build}"], what="the build"
    )


@pytest.fixture
def building(zk, other):
    """A builder holds the lock of the image."""
    with other.imageBuildLock(IMAGE, blocking=False):
        wait_for(lambda: zk.image_tree.data().build_locks.get(IMAGE, (0, False))[1])
        yield


@pytest.mark.spec("CLI-6.5: new keys may be added; tables stay as they are")
def test_progress_of_a_build(get, zk, other, building):
    build = make_build(other, state="building")
    other.progress.write(
        BuildProgress(
            IMAGE,
            build,
            "nb01",
            phase="install",
            started=time.time() - 30,
            expected=60.0,
            last_line="Unpacking",
            log="/l/x.log",
            tail=["a secret of the tail"],
        )
    )
    other.progress.write(
        BuildProgress(
            IMAGE,
            "f" * 32,
            "nb01",
            state="failed",
            reason="no space left",
            exit_code=1,
            ended=time.time(),
        )
    )
    wait_for(
        lambda: len(zk.progress_tree.data().builds) == 2 and zk.image_tree.data().builds,
        what="the mirror",
    )
    rows = get("/dib-image-list")
    assert len(rows) == 1 and list(rows[0])[:6] == BUILD_KEYS
    assert list(rows[0])[6:] == [
        "phase",
        "elapsed",
        "expected",
        "exit_code",
        "reason",
        "log",
        "last_line",
        "progress",
    ]
    assert (rows[0]["phase"], rows[0]["expected"], rows[0]["last_line"]) == (
        "install",
        60,
        "Unpacking",
    )
    assert rows[0]["elapsed"] in range(30, 40) and 0.4 < rows[0]["progress"] < 0.7
    header = get("/dib-image-list", "text/plain").splitlines()[1]
    assert [cell.strip() for cell in header.split("|")[1:-1]] == [
        "ID",
        "Image",
        "Builder",
        "Formats",
        "State",
        "Age",
    ]
    failed = next(row for row in get("/image-progress") if row["state"] == "failed")
    assert (failed["reason"], failed["exit_code"], failed["id"]) == (
        "no space left",
        1,
        f"{IMAGE}-{'f' * 32}",
    )
    assert "no space left" in get("/image-progress", "text/plain")
    assert "| failed   |" in get("/image-progress?fields=state", "text/plain")
    for path in ("/dib-image-list", "/image-progress"):
        assert "secret" not in json.dumps(get(path))


def test_progress_of_uploads(get, zk, other, zk_chroot):
    build = make_build(other)
    number = make_upload(other, build, state="uploading")
    failed = make_upload(other, build, provider="q", state="failed")
    builder = zk_chroot.connect()
    store = ProgressStore(builder.client)
    store.write(UploadProgress(IMAGE, build, "p", number, bytes_total=100))
    store.write(UploadFailure(IMAGE, "q", build, failed, "quota exceeded"))
    progress = zk.progress_tree.data
    wait_for(
        lambda: (
            progress().uploads and progress().failures and len(zk.image_tree.data().uploads) == 2
        ),
        what="the mirror",
    )
    running, broken = get("/image-list")
    assert list(running)[:8] == UPLOAD_KEYS
    assert {key: running[key] for key in list(running)[8:]} == {"bytes_total": 100, "reason": None}
    assert broken["reason"] == "quota exceeded"
    header = get("/image-list", "text/plain").splitlines()[1]
    assert header.count("|") == 9 and "Bytes" not in header
    # A builder that is killed leaves no running upload behind.
    builder.disconnect()
    wait_for(lambda: get("/image-list")[0]["bytes_total"] is None, what="the end of the upload")


@pytest.mark.spec("issue: images: failures with reason and log; the open lists have no log")
def test_log_of_a_failed_build(get, zk, other, upload, building):
    for state, ended, tail in (
        ("failed", 5.0, ["unpacking", "no space <left>\x1b[0m"]),
        ("building", None, ["going on"]),
    ):
        build = BuildProgress(
            IMAGE, state[0] * 32, "nb01", state=state, ended=ended, log="/l/x.log", tail=tail
        )
        other.progress.write(build)
    wait_for(lambda: len(zk.progress_tree.data().builds) == 2, what="the mirror")
    found = get(f"/api/v1/explain/image/{IMAGE}")
    assert list(found["logs"].values()) == ["going on", "unpacking\nno space <left>"]
    assert f"build {'f' * 32} (failed on nb01, /l/x.log)" in list(found["logs"])[1]
    text = explain(zk, "image", IMAGE, HistoryReader()).text()
    assert "    | no space <left>" in text.splitlines()
    for path in ("/dib-image-list", "/image-progress", "/api/v1/builds"):
        assert "no space" not in json.dumps(get(path))


def report_images(other, images):
    """Write the report of a launcher that has these images."""
    empty = {
        "config": {},
        "providers": {},
        "not_running": {},
        "labels": {},
        "lately": {},
        "tenants": {},
    }
    content = {"hostname": "l1", "details": [], "waiting": [], **empty, "images": images}
    reports.write(other.kazoo_client, reports.path("l1-1"), content)


@pytest.mark.spec(
    "issue: configured images, paused and never built ones, too; next build, age, labels"
)
def test_images_that_were_never_built_are_listed_with_their_labels(get, zk, other, upload):
    used = {"labels": ["noble"], "providers": ["p", "q"]}
    report_images(
        other,
        {
            IMAGE: {"paused": False, "rebuild_age": 3600, **used},
            "never": {"paused": False, "labels": [], "providers": []},
            "frozen": {"paused": True, "rebuild_age": "x", **used},
        },
    )
    wait_for(lambda: zk.readReports(), what="the report in the mirror")
    rows = {row["image"]: row for row in get("/api/v1/images")["rows"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        IMAGE: "ready",
        "never": "never built",
        "frozen": "paused",
    }
    assert rows[IMAGE]["next_build"] == rows[IMAGE]["age"] + 3600 and rows[IMAGE]["labels"] == [
        "noble"
    ]
    assert rows["frozen"]["next_build"] is None and rows["frozen"]["rebuild_age"] is None
    facts = get(f"/api/v1/explain/image/{IMAGE}")["facts"]
    assert facts["age"].endswith(" of 1 h (rebuild-age)") and facts["next build"].startswith(
        "in 59 min"
    )
    assert facts["upload to p"].startswith("ready for") and facts["upload to q"] == "none yet"
    facts = get("/api/v1/explain/image/frozen")["facts"]
    assert (facts["state"], facts["next build"], facts["upload to p"]) == (
        "paused",
        "none while it is paused",
        "none yet",
    )
    assert (
        get("/api/v1/explain/image/never")["facts"]["labels"]
        == "none: no label of a running launcher uses it"
    )


@pytest.mark.spec("issue: progress while building: phase, since when, share of the usual time")
def test_progress_of_a_build_is_part_of_the_explanation(get, zk, other, upload, building):
    report_images(
        other,
        {IMAGE: {"paused": False, "rebuild_age": 3600, "labels": ["noble"], "providers": ["p"]}},
    )
    running = BuildProgress(
        IMAGE, "b" * 32, "nb01", phase="install", started=time.time() - 30, expected=60.0
    )
    other.progress.write(running)
    other.progress.write(
        BuildProgress(IMAGE, upload[0], "nb01", state="ready", ended=1.0, sizes={"raw": 5 << 30})
    )
    wait_for(
        lambda: len(zk.progress_tree.data().builds) == 2 and zk.readReports(), what="the mirror"
    )
    (row,) = get("/api/v1/images")["rows"]
    assert (row["state"], row["phase"], row["size"]) == (
        "building",
        "install",
        5 << 30,
    ) and 0.4 < row["progress"] < 0.8
    facts = get(f"/api/v1/explain/image/{IMAGE}")["facts"]
    assert facts["building"].startswith("phase install on nb01 for 3") and facts[
        "building"
    ].endswith(" of the usual 1 min")
    assert facts["size"] == "5.0 GiB" and "next build" not in facts


@pytest.mark.spec("issue: no logs of old failed builds after a success")
def test_logs_of_failed_builds_are_shown_until_a_build_succeeds(get, zk, other, upload):
    for number, name in enumerate("ab"):
        other.progress.write(
            BuildProgress(
                IMAGE,
                name * 32,
                "nb01",
                state="failed",
                started=10.0 * number + 1,
                ended=10.0 * number + 5,
                tail=[f"log of {name}"],
            )
        )
    wait_for(lambda: len(zk.progress_tree.data().builds) == 2, what="the mirror")
    assert get("/api/v1/images")["rows"][0]["state"] == "failed"
    # The newest one only.
    assert list(get(f"/api/v1/explain/image/{IMAGE}")["logs"].values()) == ["log of b"]
    other.progress.write(
        BuildProgress(
            IMAGE, upload[0], "nb01", state="ready", started=100.0, ended=200.0, tail=["fine"]
        )
    )
    wait_for(lambda: len(zk.progress_tree.data().builds) == 3, what="the success in the mirror")
    wait_for(lambda: get(f"/api/v1/explain/image/{IMAGE}")["logs"] == {}, what="no log")
    assert get("/api/v1/images")["rows"][0]["state"] == "ready"
    for provider in ("east", "west"):
        other.progress.write(UploadFailure(IMAGE, provider, reason="no", time=time.time()))
    path = f"/api/v1/explain/image/{IMAGE}"
    found = wait_for(
        lambda: each if len((each := get(path))["problems"]) == 2 else None, what="failed uploads"
    )
    assert found["problems"] == [
        f"provider {name}: image {IMAGE}: the last upload failed: no" for name in ("east", "west")
    ]
    assert found["logs"] == {}, "its last build is ready"


def test_the_mirror_costs_nothing_while_nothing_changes(get, zk, other, upload):
    other.progress.write(BuildProgress(IMAGE, upload[0], "nb01"))
    wait_for(lambda: zk.progress_tree.data().builds, what="the mirror")
    reads = sum(tree.reads for tree in zk.trees)
    for _ in range(20):
        for path in ("/image-list", "/dib-image-list", "/image-progress"):
            get(path)
    assert sum(tree.reads for tree in zk.trees) == reads


def test_broken_records_stop_no_listing(get, zk, other, upload):
    kazoo = other.kazoo_client
    kazoo.create("/nodepool/image-progress/builds/broken", b"{", makepath=True)
    kazoo.create(f"/nodepool/image-progress/builds/{upload[0]}", b'{"image": 5, "state": "?"}')
    wait_for(lambda: len(zk.progress_tree.bad) == 2, what="the mirror")
    assert get("/dib-image-list")[0]["phase"] is None and get("/image-progress") == []
    record = zk_module.ImageBuild()
    record.state = "ready"
    other.storeBuild("second", record)
    wait_for(lambda: len(get("/dib-image-list")) == 2, what="the second build")
