"""The nodepool command against a real ZooKeeper."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import prettytable
import pytest
import yaml

from nodepool.cmd import nodepoolcmd
from nodepool.cmd.commands import requests as requests_command
from nodepool.cmd.commands.context import CommandError, user
from nodepool.exceptions import TimeoutException
from nodepool.lease import LeaseError
from nodepool.zk import paths
from nodepool.zk import zookeeper as zk_module
from nodepool.zk.zookeeper import ZooKeeper
from tests import REPOSITORY
from tests.conftest import wait_for
from tests.support.deadline import limit

BASE = {
    "labels": [{"name": "fake-label"}],
    "diskimages": [
        {"name": "fake-image", "elements": ["vm"]},
        {"name": "paused-image", "elements": ["vm"], "pause": True},
        {"name": "base", "abstract": True},
    ],
    "providers": [],
}


def snapshot(kazoo, path="/"):
    """Everything in the chroot: path -> (data, version, child version)."""
    result = {}
    for child in sorted(kazoo.get_children(path)):
        full = f"{path.rstrip('/')}/{child}"
        data, stat = kazoo.get(full)
        result[full] = (data, stat.mzxid, stat.cversion)
        result.update(snapshot(kazoo, full))
    return result


@pytest.fixture
def config(zk_chroot):
    return zk_chroot.config(BASE)


@pytest.fixture
def plain(zk_chroot):
    """A facade without mirror, as the command has."""
    return ZooKeeper(zk_chroot.connect(), enable_cache=False)


@pytest.fixture
def run(config, capsys):
    def run(*args, status=0):
        assert nodepoolcmd.main(["-c", config, *args]) == status
        return capsys.readouterr().out

    return run


@pytest.fixture
def rows(run, monkeypatch):
    """Rows that a command hands to PrettyTable."""

    def rows(*args):
        found = []
        original = prettytable.PrettyTable.add_row

        def add_row(self, row, **kw):
            found.append(row)
            return original(self, row, **kw)

        with monkeypatch.context() as patch:
            patch.setattr(prettytable.PrettyTable, "add_row", add_row)
            run(*args)
        return found

    return rows


@pytest.fixture
def console(config):
    """The console script in a separate process."""

    def console(*args, **kw):
        return subprocess.run(
            [sys.executable, "-m", "nodepool.cmd.nodepoolcmd", "-c", config, *args],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            **kw,
        )

    return console


def make_node(plain, state="ready", **values):
    node = zk_module.Node()
    node.state = state
    node.type = ["fake-label"]
    node.provider = "p"
    node.pool = "main"
    for key, value in values.items():
        setattr(node, key, value)
    plain.storeNode(node)
    return node


def make_build(plain, image="fake-image", state="ready"):
    build = zk_module.ImageBuild()
    build.state = state
    build.builder = "nb01"
    build.formats = ["qcow2"]
    return plain.storeBuild(image, build)


def make_upload(
    plain, build_id, provider="p", image="fake-image", state="ready", external_id="ext-1"
):
    upload = zk_module.ImageUpload()
    upload.state = state
    upload.external_id = external_id
    upload.external_name = "name-1"
    return plain.storeImageUpload(image, build_id, provider, upload)


def make_fulfilled(plain, count=2, labels=None):
    """A fulfilled request with ready nodes, as a launcher leaves them."""
    request_id = plain.kazoo_client.create(
        f"{paths.REQUESTS}/200-", b"{}", sequence=True, makepath=True
    ).rpartition("/")[2]
    nodes = [
        make_node(plain, allocated_to=request_id, interface_ip="192.0.2.7") for _ in range(count)
    ]
    record = {
        "state": "fulfilled",
        "state_time": time.time(),
        "node_types": ["fake-label"] * count,
        "nodes": [node.id for node in nodes],
        "requestor": "t",
        "event_id": "e",
    }
    plain.kazoo_client.set(paths.request(request_id), json.dumps(record).encode())
    return request_id, [node.id for node in nodes]


def set_state(plain, request_id, state, **values):
    path = paths.request(request_id)
    data, _ = plain.kazoo_client.get(path)
    plain.kazoo_client.set(
        path, json.dumps({**json.loads(data), "state": state, **values}).encode()
    )


# -- common


@pytest.mark.spec("CLI-9: no subcommand: main() returns 1")
def test_missing_subcommand_returns_1(config, capsys, monkeypatch):
    assert nodepoolcmd.main(["-c", config]) == 1
    assert "usage: nodepool" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["nodepool", "-c", config])
    assert nodepoolcmd.main() == 1


@pytest.mark.spec("CLI-1: --version prints on standard output, status 0; wrong command line 2")
def test_version_and_usage(console):
    reply = console("--version")
    assert (reply.returncode, reply.stdout[:18]) == (0, "Nodepool version: ")
    reply = console("nonsense")
    assert reply.returncode == 2 and "usage:" in reply.stderr


@pytest.mark.spec("CLI-1: one clear line on standard error, traceback only with --debug")
def test_errors_are_one_line(console, zk_chroot):
    reply = console("image-build", "no-such-image")
    assert reply.returncode == 1 and reply.stdout == ""
    assert reply.stderr.splitlines()[-1] == (
        "nodepool: error: Trying to build a non disk-image-builder image: no-such-image"
    )
    assert "Traceback" not in reply.stderr
    reply = console("--debug", "image-build", "no-such-image")
    assert reply.returncode == 1 and "Traceback" in reply.stderr
    reply = console("-c", "/no/such/file", "list")
    assert (
        reply.returncode == 1
        and "Traceback" not in reply.stderr
        and "/no/such/file" in reply.stderr
    )


def test_zookeeper_is_not_there(console, zk_chroot):
    path = zk_chroot.config(
        {**BASE, "zookeeper-servers": [{"host": "127.0.0.1", "port": 9}]}, name="other.yaml"
    )
    reply = console("-c", path, "--connect-timeout", "0.5", "list")
    assert reply.returncode == 1
    assert reply.stderr.splitlines()[-1].startswith(
        "nodepool: error: No ZooKeeper server answers at 127.0.0.1:9"
    )


@pytest.mark.spec("CLI-5: listings never write, and create no lock znodes")
def test_listings_do_not_write(run, plain):
    make_node(plain)
    plain.lockNode(make_node(plain))
    make_upload(plain, make_build(plain))
    make_fulfilled(plain)
    run("image-build", "fake-image")
    before = snapshot(plain.kazoo_client)
    for command in (
        "list",
        "image-list",
        "dib-image-list",
        "image-status",
        "request-list",
        "alien-image-list",
    ):
        for form in ("table", "json", "yaml", "csv"):
            run(command, "--format", form)
    run("info", "p")
    assert snapshot(plain.kazoo_client) == before


@pytest.mark.spec("CLI-9: image-list of an empty cluster: no rows")
def test_listings_of_an_empty_tree(run, plain):
    for command in (
        "list",
        "image-list",
        "dib-image-list",
        "image-status",
        "request-list",
        "alien-image-list",
    ):
        assert run(command).count("\n") == 4
        assert json.loads(run(command, "--format", "json")) == []
        assert yaml.safe_load(run(command, "--format", "yaml")) == []
    assert snapshot(plain.kazoo_client) == {}


# -- nodes


@pytest.mark.spec("CLI-9: list: 9 cells per row, --detail 21; state is cell 6 (from 0), id cell 0")
def test_list_has_9_columns_and_21_with_detail(run, rows, plain):
    first, second = make_node(plain, public_ipv4="192.0.2.1"), make_node(plain, state="building")
    plain.lockNode(second)
    found = rows("list")
    assert [len(row) for row in found] == [9, 9]
    assert [(row[0], row[6], row[8]) for row in found] == [
        (first.id, "ready", "unlocked"),
        (second.id, "building", "locked"),
    ]
    assert [len(row) for row in rows("list", "--detail")] == [21, 21]
    line = run("list").splitlines()[3]
    assert line.split("|")[5].strip() == "192.0.2.1"
    assert len(json.loads(run("list", "--format", "json"))) == 2
    plain.unlockNode(second)


@pytest.mark.spec("CLI-9: hold shows hold")
def test_held_node_is_shown_as_hold(rows, run, plain):
    node = make_node(plain)
    assert [(row[0], row[6], row[8]) for row in rows("hold", node.id)] == [
        (node.id, "hold", "unlocked")
    ]
    assert plain.getNode(node.id).state == "hold"
    assert run("hold", "999") == "Node id 999 not found\n"
    assert plain.getNodes() == [node.id]


@pytest.mark.spec("CLI-9: hold of a node locked by somebody raises the timeout exception after 5 s")
@pytest.mark.parametrize("command", ["hold", "delete"])
def test_locked_node_is_not_changed_after_a_time_out(config, plain, command, monkeypatch):
    from nodepool.cmd.commands import nodes

    assert nodes.LOCK_TIMEOUT == 5
    monkeypatch.setattr(nodes, "LOCK_TIMEOUT", 0.3)
    node = make_node(plain)
    plain.lockNode(node)
    with pytest.raises(TimeoutException):
        nodepoolcmd.main(["-c", config, command, node.id])
    assert plain.getNode(node.id).state == "ready"
    plain.unlockNode(node)


def test_deleted_node_is_marked_and_unlocked(rows, run, plain):
    node = make_node(plain)
    assert [(row[0], row[6], row[8]) for row in rows("delete", node.id)] == [
        (node.id, "deleting", "unlocked")
    ]
    assert run("delete", "999") == "Node id 999 not found\n"


class FakeManager:
    """A provider that deletes nodes in a thread and knows some images."""

    def __init__(self, images=()):
        self.calls = []
        self.adapter = SimpleNamespace(_listImages=self._list_images)
        self.images = images

    def _list_images(self):
        if isinstance(self.images, Exception):
            raise self.images
        return self.images

    def start(self, zk):
        self.zk = zk
        self.calls.append("start")

    def startNodeCleanup(self, node):
        assert node.state == "deleting"

        def work():
            self.zk.deleteNode(node)

        thread = threading.Thread(target=work, name="NodeDeleter")
        thread.start()
        return thread

    def stop(self):
        self.calls.append("stop")

    def join(self):
        self.calls.append("join")


@pytest.fixture
def managers(monkeypatch):
    """Providers by name that get_provider gives instead of real ones."""
    by_name = {}
    monkeypatch.setattr(
        "nodepool.driver.lifecycle.get_provider", lambda config: by_name[config.name]
    )
    return by_name


@pytest.fixture
def providers(monkeypatch):
    """Provider configurations put into every loaded configuration."""
    from nodepool.cmd.commands import context

    configs = {}
    original = context.load_config

    def load(*args, **options):
        config = original(*args, **options)
        config.providers.update(configs)
        return config

    monkeypatch.setattr(context, "load_config", load)
    return configs


def provider_config(name, **values):
    return SimpleNamespace(name=name, manage_images=True, diskimages={"fake-image": None}, **values)


@pytest.mark.spec("CLI-9: delete and delete --now make the node disappear")
def test_node_disappears_after_delete_with_and_without_now(run, rows, plain, managers, providers):
    node = make_node(plain)
    assert (
        run("delete", "--now", node.id)
        == f"Provider p for node {node.id} not defined on this launcher\n"
    )
    assert plain.getNode(node.id).state == "ready"
    managers["p"] = FakeManager()
    providers["p"] = provider_config("p")
    assert rows("delete", "--now", node.id) == []
    assert plain.getNodes() == []
    assert managers["p"].calls == ["start", "stop", "join"]


# -- images


@pytest.mark.spec("CLI-9: image-list cells 3, 6; dib-image-list cells 0, 1, 4; image-status cell 0")
def test_image_listings_have_stable_columns(rows, plain):
    build = make_build(plain)
    number = make_upload(plain, build)
    (row,) = rows("image-list")
    assert (row[0], row[1], row[3], row[6]) == (build, number, "fake-image", "ready")
    (row,) = rows("dib-image-list")
    assert (row[0], row[1], row[4]) == (f"fake-image-{build}", "fake-image", "ready")
    assert [row[0] for row in rows("image-status")] == ["fake-image"]


@pytest.mark.spec("CLI-9: pause shows paused; double pause and unpause are quiet; then ready again")
def test_pausing_twice_is_silent(run, rows, plain, config):
    make_build(plain)
    for _ in range(2):
        assert run("image-pause", "fake-image") == ""
    assert [row[4] for row in rows("dib-image-list")] == ["paused"]
    for _ in range(2):
        assert run("image-unpause", "fake-image") == ""
    assert [row[4] for row in rows("dib-image-list")] == ["ready"]
    assert run("image-unpause", "no-such-image") == ""
    assert run("image-pause", "paused-image") == ""
    assert plain.getImageNames() == ["fake-image", "paused-image"]
    with pytest.raises(Exception, match="image no-such-image is neither in"):
        nodepoolcmd.main(["-c", config, "image-pause", "no-such-image"])
    assert plain.getImageNames() == ["fake-image", "paused-image"]


@pytest.mark.spec("CLI-9: image-build of an image paused in the configuration raises")
def test_build_of_an_image_paused_in_the_configuration_is_refused(run, plain, config):
    for name, text in (
        ("paused-image", "Skipping build request for image paused-image; paused"),
        ("base", "Trying to build a non disk-image-builder image: base"),
        ("nothing", "Trying to build a non disk-image-builder image: nothing"),
    ):
        with pytest.raises(Exception, match=text):
            nodepoolcmd.main(["-c", config, "image-build", name])
        assert not plain.hasBuildRequest(name)
    run("image-pause", "fake-image")
    for _ in range(2):
        assert run("image-build", "fake-image") == ""
    assert plain.hasBuildRequest("fake-image")


@pytest.mark.spec("CLI-9: image-status lists the image while a request is pending")
def test_image_status_lists_images_with_a_request(run, plain):
    run("image-build", "fake-image")

    def state():
        (row,) = json.loads(run("image-status", "--format", "json"))
        assert row["image"] == "fake-image" and isinstance(row["build_request_age"], int)
        return row["build_request"]

    assert state() == "pending"
    with plain.imageBuildLock("fake-image", blocking=False):
        assert state() == "pending"
        make_build(plain, state="building")
        assert state() == "building"
    assert state() == "pending"


@pytest.mark.spec("CLI-9: image-delete with nonsense arguments ends quietly")
def test_upload_in_progress_is_not_deleted(run, plain):
    def delete(build, number):
        return run(
            "image-delete",
            "--provider",
            "p",
            "--image",
            "fake-image",
            "--build-id",
            build,
            "--upload-id",
            number,
        )

    assert delete("nonsense", "nonsense") == "Image upload not found\n"
    build = make_build(plain)
    uploading = make_upload(plain, build, state="uploading")
    ready = make_upload(plain, build)
    assert delete(build, uploading) == "Cannot delete because image upload in progress\n"
    assert delete(build, ready) == ""
    assert plain.getImageUpload("fake-image", build, "p", ready).state == "deleting"
    assert plain.getImageUpload("fake-image", build, "p", ready).external_id == "ext-1"


def test_dib_image_delete(run, plain, config):
    build = make_build(plain, state="building")
    assert run("dib-image-delete", f"fake-image-{build}") == "Cannot delete a build in progress\n"
    build = make_build(plain)
    assert run("dib-image-delete", f"fake-image-{build}") == ""
    assert plain.getBuild("fake-image", build).state == "deleting"
    assert run("dib-image-delete", "fake-image-77") == "Build fake-image-77 not found\n"
    with pytest.raises(Exception, match="is not <image>-<build id>"):
        nodepoolcmd.main(["-c", config, "dib-image-delete", "nodash"])


def image(number, **properties):
    return SimpleNamespace(id=f"ext-{number}", name=f"name-{number}", properties=properties)


@pytest.mark.spec("CLI-9: alien-image-list prints no row when everything is accounted for")
def test_alien_image_list(run, rows, plain, managers, providers, caplog):
    make_upload(plain, make_build(plain))
    snapshot = image(3, nodepool_build_id="x", base_image_ref="ext-1")
    managers["p"] = FakeManager([image(1, nodepool_build_id="x"), image(2), snapshot])
    managers["q"] = FakeManager(RuntimeError("no credentials"))
    managers["r"] = FakeManager([image(1, nodepool_build_id="x")])
    for name in managers:
        providers[name] = provider_config(name)
    providers["static"] = SimpleNamespace(name="static", manage_images=False)
    assert rows("alien-image-list", "p") == []
    assert rows("alien-image-list") == [["r", "name-1", "ext-1"]]
    assert "Exception listing alien images for q: no credentials" in caplog.text
    assert rows("alien-image-list", "nobody") == []
    assert managers["p"].calls == ["start", "stop", "join"] * 2


# -- providers


@pytest.mark.spec("CLI-9: info P lists image, build id, upload ids, nodes; erase P --force")
def test_info_and_erase(run, rows, plain):
    build = make_build(plain)
    uploads = [make_upload(plain, build), make_upload(plain, build)]
    other_upload = make_upload(plain, build, provider="q")
    node, other = make_node(plain, external_id="srv-1"), make_node(plain, provider="q")
    plain.lockNode(node)
    assert rows("info", "p") == [["fake-image", build, ",".join(uploads)], [node.id, "srv-1"]]
    lines = run("info", "p").splitlines()
    assert lines[:3] == ["ZooKeeper data for provider p", "", "Image data:"] and lines[8:10] == [
        "",
        "Nodes:",
    ]
    assert json.loads(run("info", "p", "--format", "json"))[0]["nodes"] == [
        {"id": node.id, "server_id": "srv-1"}
    ]
    before = plain.getNode(other.id), plain.getImageUpload("fake-image", build, "q", other_upload)
    out = run("erase", "p", "--force")
    assert out == "Erasing build data for p...\nErasing node data for p...\n"
    assert rows("info", "p") == []
    assert plain.getBuildProviders("fake-image", build) == ["q"] and plain.getNodes() == [other.id]
    assert (
        plain.getNode(other.id),
        plain.getImageUpload("fake-image", build, "q", other_upload),
    ) == before
    assert run("erase", "nobody", "--force")


@pytest.mark.parametrize(
    ("answer", "erased"),
    [("y\n", True), ("Y\n", True), ("\n", False), ("yes\n", False), ("", False)],
)
def test_erase_asks_for_confirmation(console, plain, answer, erased):
    make_node(plain)
    reply = console("erase", "p", input=answer)
    assert reply.returncode == 0
    assert reply.stdout.startswith(
        "\nWARNING! This action is not reversible!\nErase ZooKeeper data for provider p? [N/y] "
    )
    assert ("Aborting. No data erased." in reply.stdout) == (not erased)
    assert (plain.getNodes() == []) == erased


# -- export and import


@pytest.mark.spec("CLI-9: export/import, BLD-18")
def test_exported_image_data_can_be_imported(run, plain, tmp_path):
    build = make_build(plain)
    with plain.imageUploadLock("fake-image", build, "p", blocking=False):
        number = make_upload(plain, build)
    assert number == "0000000001"
    plain.kazoo_client.ensure_path(paths.uploads("fake-image", build, "q"))
    run("image-pause", "paused-image")
    run("image-build", "fake-image")
    path = tmp_path / "export.json"
    path.write_text("x" * 100000)
    assert run("export-image-data", "--force", str(path)) == ""
    assert path.stat().st_mode & 0o777 == 0o600
    records = json.loads(path.read_text())
    assert sorted(records) == sorted(
        [
            f"{paths.IMAGES}/paused-image/pause",
            paths.build("fake-image", build),
            paths.upload("fake-image", build, "p", number),
        ]
    )
    before = {
        name: value[0] for name, value in snapshot(plain.kazoo_client).items() if name in records
    }
    plain.kazoo_client.delete("/nodepool", recursive=True)
    assert run("import-image-data", str(path)) == ""
    after = {
        name: value[0] for name, value in snapshot(plain.kazoo_client).items() if name in records
    }
    assert after == before
    with plain.imageUploadLock("fake-image", build, "p", blocking=False):
        assert make_upload(plain, build) == "0000000003"
    assert run("import-image-data", str(path)) == ""
    assert not [
        name for name in os.listdir(tmp_path) if name not in ("export.json", "nodepool.yaml")
    ]


def test_import_moves_the_counter_beyond_gaps(run, plain, tmp_path):
    path = tmp_path / "data.json"
    uploads = paths.uploads("i", "b", "p")
    path.write_text(json.dumps({f"{uploads}/{n:010}": '{"state": "ready"}' for n in (3, 5)}))
    run("import-image-data", str(path))
    assert plain.getImageUploadNumbers("i", "b", "p") == ["0000000003", "0000000005"]
    assert plain.kazoo_client.create(f"{uploads}/", sequence=True).endswith("/0000000006")


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "[]",
        '{"/zuul/x": ""}',
        '{"/nodepool/images/a/builds/..": "x"}',
        '{"/nodepool/images/a/pause": 1}',
    ],
)
def test_import_refuses_other_files(config, plain, tmp_path, text):
    path = tmp_path / "data.json"
    path.write_text(text)
    with pytest.raises(Exception, match=str(path)):
        nodepoolcmd.main(["-c", config, "import-image-data", str(path)])
    assert snapshot(plain.kazoo_client) == {}


# -- requests


def test_ids_are_printed_while_more_requests_are_created(config, plain, capsys, monkeypatch):
    records = [requests_command.new_request] * requests_command.PORTION
    monkeypatch.setattr(
        requests_command, "new_request", lambda args: records.pop()(args) if records else 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        nodepoolcmd.main(["-c", config, "request", "create", "a", "--count", "1000"])
    ids = capsys.readouterr().out.split()
    assert ids == sorted(plain.getNodeRequests()) and len(ids) == requests_command.PORTION


def test_created_requests_have_the_given_options(run, plain):
    ids = run(
        "request",
        "create",
        "a",
        "a",
        "b",
        "--priority",
        "200",
        "--relative-priority",
        "7",
        "--tenant",
        "t",
        "--provider",
        "p",
        "--count",
        "2",
    ).split()
    assert ids == ["200-0000000000", "200-0000000001"]
    data, stat = plain.kazoo_client.get(paths.request(ids[0]))
    record = json.loads(data)
    assert stat.ephemeralOwner == 0
    assert set(record) == {
        "requestor_data",
        "node_types",
        "requestor",
        "created_time",
        "provider",
        "state",
        "state_time",
        "relative_priority",
        "event_id",
        "tenant_name",
    }
    assert record["node_types"] == ["a", "a", "b"] and record["state"] == "requested"
    assert (record["relative_priority"], record["tenant_name"], record["provider"]) == (7, "t", "p")
    request = plain.getNodeRequest(ids[0])
    assert request.priority == ("200", 7, "0000000000")
    assert len(json.loads(run("request", "create", "a", "--json"))) == 1
    assert [row["id"] for row in json.loads(run("request", "list", "--format", "json"))][
        1
    ] == "200-0000000000"


@pytest.mark.parametrize(("state", "status"), [("fulfilled", 0), ("failed", 1)])
def test_wait_returns_the_outcome_as_status(console, plain, state, status):
    request_id = console("request", "create", "a").stdout.strip()

    def work():
        for step in ("pending", state):
            time.sleep(0.2)
            set_state(
                plain,
                request_id,
                step,
                nodes=["0000000007"] if step == "fulfilled" else [],
                declined_by=["l1"] if step == "failed" else [],
            )

    process = threading.Thread(target=work, name="launcher")
    process.start()
    reply = console("request", "wait", request_id, "--timeout", "20")
    process.join()
    assert reply.returncode == status, reply.stderr
    assert reply.stdout.splitlines()[-1].split()[2:4] == [request_id, state]
    assert ("declined by l1" in reply.stdout) == (state == "failed")


def test_request_wait_reports_timeout_and_deletion(run, plain):
    request_id = run("request", "create", "a").strip()
    out = run("request", "wait", request_id, "--timeout", "0.2", status=3)
    assert out.split()[2:4] == [request_id, "requested"]
    (outcome,) = json.loads(
        run("request", "wait", request_id, "--timeout", "0.2", "--json", status=3)
    )
    assert outcome["state"] == "requested"
    assert run("request", "cancel", request_id) == ""
    assert run("request", "cancel", request_id, status=1) == f"Request {request_id} not found\n"
    assert run("request", "wait", request_id, status=1).split()[3] == "gone"


def test_request_create_and_wait(run, plain):
    def work():
        (request_id,) = wait_for(plain.getNodeRequests)
        set_state(plain, request_id, "fulfilled", nodes=["0000000001"])

    thread = threading.Thread(target=work, name="launcher")
    thread.start()
    (outcome,) = json.loads(run("request", "create", "a", "--wait", "--json"))
    thread.join()
    assert outcome["state"] == "fulfilled" and outcome["nodes"] == ["0000000001"]


def test_show_prints_a_request_with_its_nodes(run, plain, config):
    request_id, nodes = make_fulfilled(plain)
    out = run("request", "show", request_id)
    assert f"Request {request_id}" in out and "Requestor: t" in out and nodes[1] in out
    record = json.loads(run("request", "show", request_id, "--json"))
    assert (
        record["id"] == request_id
        and [node["interface_ip"] for node in record["nodes"]] == ["192.0.2.7"] * 2
    )
    with pytest.raises(Exception, match="Request 100-1 not found"):
        nodepoolcmd.main(["-c", config, "request", "show", "100-1"])


def test_accept_with_command(run, plain, tmp_path):
    request_id, nodes = make_fulfilled(plain)
    script = (
        "import json, os, sys\n"
        "open(sys.argv[1], 'w').write(os.environ['NODEPOOL_NODES_JSON'])\n"
        "sys.exit(7 if sys.argv[2:] == ['--', '-x'] else 8)\n"
    )
    out = tmp_path / "seen"
    run(
        "request",
        "accept",
        request_id,
        "--",
        sys.executable,
        "-c",
        script,
        str(out),
        "--",
        "-x",
        status=7,
    )
    seen = json.loads(out.read_text())
    assert [node["id"] for node in seen] == nodes and {node["state"] for node in seen} == {"in-use"}
    assert plain.getNodeRequests() == []
    for node in plain.readNodes():
        assert node.state == "used" and not node.lock_contenders and node.allocated_to == request_id


def test_accept_and_hold(run, plain):
    request_id, nodes = make_fulfilled(plain, count=1)
    thread = threading.Thread(
        target=lambda: run("request", "accept", request_id, "--hold", "1"), name="user"
    )
    thread.start()

    def in_use():
        (node,) = plain.readNodes()
        return node if node.state == "in-use" and node.lock_contenders else None

    node = wait_for(in_use)
    assert node.user_data["request"] == request_id and "zuul_system" not in node.user_data
    thread.join(10)
    (node,) = plain.readNodes()
    assert node.id == nodes[0] and node.state == "used" and not node.lock_contenders


def test_accept_ends_on_sigint(config, plain):
    request_id, _ = make_fulfilled(plain, count=1)
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "nodepool.cmd.nodepoolcmd",
            "-c",
            config,
            "request",
            "accept",
            request_id,
            "--json",
        ],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        (node,) = json.loads(process.stdout.readline())
        assert node["state"] == "in-use"
        process.terminate()
        assert process.wait(10) == 0
    (node,) = plain.readNodes()
    assert node.state == "used" and not node.lock_contenders


@pytest.mark.parametrize("by", ["request", "node"])
def test_accept_detached_and_return(run, plain, by):
    request_id, nodes = make_fulfilled(plain)
    out = run("request", "accept", request_id, "--detach")
    assert [line.split()[0] for line in out.splitlines()] == ["Lease", *nodes]
    assert out.startswith(f"Lease {request_id} for 1 d\n") and plain.getNodeRequests() == []
    for node in plain.readNodes():
        assert (node.state, node.hold_expiration, node.allocated_to) == ("hold", 86400, request_id)
        assert node.comment == f"lease {user()}" and not node.lock_contenders
    assert run("request", "return", *([request_id] if by == "request" else nodes)) == ""
    for node in plain.readNodes():
        assert node.state == "used" and not node.lock_contenders


def test_accept_detached_lasts_as_long_as_it_reports(run, config, plain):
    request_id, nodes = make_fulfilled(plain)
    found = json.loads(run("request", "accept", request_id, "--detach", "--for", "2h", "--json"))
    assert [node["id"] for node in found] == nodes
    assert {node.hold_expiration for node in plain.readNodes()} == {7200}
    assert json.loads(run("lease", "show", request_id, "--json"))["owner"] == user()
    for options in (["--for", "2h"], ["--detach", "--for", "1s"]):
        other, _ = make_fulfilled(plain, count=1)
        with pytest.raises((CommandError, LeaseError)):
            nodepoolcmd.main(["-c", config, "request", "accept", other, *options])
        assert plain.getNodeRequest(other).state == "fulfilled"


def test_return_refuses_what_is_not_ours(config, plain, monkeypatch):
    from nodepool.cmd.commands.requests import use as requests_use

    monkeypatch.setattr(requests_use, "RETURN_LOCK_TIMEOUT", 0.2)
    ready = make_node(plain)
    locked = make_node(plain, state="in-use")
    plain.lockNode(locked)
    forgotten = make_node(plain, state="in-use")
    for argument, text in (
        (ready.id, "nothing to return"),
        (locked.id, "lock"),
        ("77", "not found"),
        ("100-1", "No node is held"),
    ):
        with pytest.raises(Exception, match=text):
            nodepoolcmd.main(["-c", config, "request", "return", argument])
    assert plain.getNode(ready.id).state == "ready" and plain.getNode(locked.id).state == "in-use"
    assert nodepoolcmd.main(["-c", config, "request", "return", forgotten.id]) == 0
    assert plain.getNode(forgotten.id).state == "used"
    plain.unlockNode(locked)


def test_accept_of_what_is_not_fulfilled(run, config, plain):
    request_id = run("request", "create", "a").strip()
    with pytest.raises(Exception, match="is requested, not fulfilled"):
        nodepoolcmd.main(["-c", config, "request", "accept", request_id])
    assert plain.getNodeRequests() == [request_id]


@pytest.mark.spec("ZK-8.7: any failure unlocks what was taken; the request is deleted")
def test_accept_of_nodes_taken_away(config, plain):
    request_id, nodes = make_fulfilled(plain)
    second = plain.getNode(nodes[1])
    second.allocated_to = "100-0000000099"
    plain.storeNode(second)
    with pytest.raises(
        Exception, match=f"Node {nodes[1]} is ready and allocated to 100-0000000099"
    ):
        nodepoolcmd.main(["-c", config, "request", "accept", request_id])
    assert plain.getNodeRequests() == []
    assert [(node.state, len(node.lock_contenders)) for node in plain.readNodes()] == [
        ("ready", 0)
    ] * 2


def test_large_lists_are_read_in_parallel(run, plain):
    plain.kazoo_client.ensure_path(paths.NODES)
    data = b'{"state": "ready", "state_time": 1, "type": ["a"]}'
    for _ in range(20):
        answers = [
            plain.kazoo_client.create_async(f"{paths.NODES}/", data, sequence=True)
            for _ in range(100)
        ]
        for answer in answers:
            answer.get(timeout=30)
    start = time.monotonic()
    assert run("list").count("\n") == 2004
    assert time.monotonic() - start < limit(5)


@pytest.mark.spec("CLI-9: config-validate on the good sample file works without ZooKeeper")
def test_config_validate_needs_no_zookeeper(tmp_path):
    sample = str(REPOSITORY / "etc" / "nodepool.yaml")
    with open(sample, encoding="utf-8") as stream:
        text = stream.read()
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(text.replace("port: 2281", "port: 9"))
    bad.write_text(text + "\nnonsense: 1\n")
    assert nodepoolcmd.main(["-c", str(good), "config-validate"]) == 0
    assert nodepoolcmd.main(["-c", str(bad), "config-validate"]) == 1


def test_audit_log_distinguishes_refused_changes_from_done_ones(run, plain, monkeypatch):
    noted = []
    monkeypatch.setattr(
        "nodepool.zk.history.append",
        lambda _kazoo, event, fields: noted.append((fields["target"], fields["result"])),
    )
    node = make_node(plain)
    run("delete", node.id)
    run("delete", "99999")
    assert noted == [(f"node {node.id}", "ok"), ("node 0000099999", "refused, or in part")]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "\x07"])
@pytest.mark.parametrize(
    "command",
    [
        ("request", "cancel"),
        ("request", "show"),
        ("request", "wait"),
        ("request", "accept"),
        ("request", "return"),
        ("explain", "node"),
        ("explain", "request"),
        ("delete",),
        ("hold",),
        ("lease", "return"),
        ("lease", "show"),
        ("image-pause",),
        ("image-unpause",),
        ("image-build",),
        ("dib-image-delete",),
    ],
)
def test_impossible_name_changes_nothing(console, plain, name, command):
    plain.kazoo_client.ensure_path(paths.REQUESTS)
    before = plain.kazoo_client.exists(paths.REQUESTS).czxid
    reply = console(*command, name)
    assert "Traceback" not in reply.stderr and "relative path" not in reply.stderr
    assert reply.returncode != 0 or "not found" in reply.stdout or command == ("image-unpause",)
    assert plain.kazoo_client.exists(paths.REQUESTS).czxid == before


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan], ids=str)
def test_json_is_valid_although_records_contain_numbers_that_it_lacks(run, plain, number):
    """Such a number is null; a program that reads the list would stop at it."""
    request = zk_module.NodeRequest()
    request.state, request.node_types = "requested", ["fake-label"]
    request.requestor_data = {"score": number}
    plain.storeNodeRequest(request)
    node = make_node(plain, external_id=number, attributes={"weight": number})
    request.nodes = [node.id]
    plain.storeNodeRequest(request)

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    for words in (
        ("list", "--format", "json", "--detail"),
        ("request", "show", request.id, "--json"),
        ("explain", "node", node.id, "--json"),
        ("explain", "request", request.id, "--json"),
    ):
        assert json.loads(run(*words), parse_constant=refuse), words
