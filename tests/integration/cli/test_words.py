"""What the nodepool command says, and its status, when something is unknown, in use or broken
(users 9, 10, 14, 19, 20).
"""

from __future__ import annotations

import json
import logging
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from nodepool.cmd import nodepoolcmd
from nodepool.cmd.commands.context import CommandError
from nodepool.exceptions import TimeoutException
from nodepool.zk import zookeeper as zk_module
from nodepool.zk.zookeeper import ZooKeeper
from tests.conftest import Chroot

BASE: dict[str, Any] = {
    "labels": [{"name": "fake-label"}],
    "diskimages": [{"name": "debian-12", "elements": ["vm"]}],
    "providers": [{"name": "cloudy", "driver": "static", "pools": []}],
}

Run = Callable[..., tuple[str, str]]


@pytest.fixture
def file(zk_chroot: Chroot) -> str:
    return zk_chroot.config(BASE)


@pytest.fixture
def plain(zk_chroot: Chroot) -> ZooKeeper:
    return ZooKeeper(zk_chroot.connect(), enable_cache=False)


@pytest.fixture
def run(file: str, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*args: str, status: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        assert nodepoolcmd.main(["-c", file, *args]) == status
        output = capsys.readouterr()
        return output.out, output.err

    return run


def make_node(plain: ZooKeeper, **values: Any) -> Any:
    node = zk_module.Node()
    node.state = "ready"
    node.type = ["fake-label"]
    node.provider, node.pool = "cloudy", "main"
    for key, value in values.items():
        setattr(node, key, value)
    plain.storeNode(node)
    return node


@pytest.mark.parametrize(
    "command",
    [
        ["delete", "77"],
        ["hold", "77"],
        ["dib-image-delete", "x-1"],
        ["image-delete", "--provider", "p", "--image", "i", "--upload-id", "1", "--build-id", "b"],
    ],
)
def test_users_9_not_found_keeps_text_and_status_of_old(
    run: Run, file: str, plain: ZooKeeper, command: list[str]
) -> None:
    out, err = run(*command)
    assert "not found" in out and err == ""
    with pytest.raises(CommandError, match="not found"):
        nodepoolcmd.main(["-c", file, "--strict", *command])


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            ["image-unpause", "debian-21"],
            "image debian-21 is neither in .* nor in ZooKeeper; did you mean debian-12?",
        ),
        (
            ["info", "clowdy"],
            "provider clowdy is neither in .* nor in ZooKeeper; did you mean cloudy?",
        ),
        (["erase", "nosuch", "--force"], "provider nosuch is neither in .* nor in ZooKeeper"),
        (["alien-image-list", "nosuch"], "provider nosuch is neither in .* nor in ZooKeeper"),
    ],
)
def test_users_9_what_was_silent_is_reported(
    run: Run, file: str, command: list[str], words: str
) -> None:
    _out, err = run(*command)
    assert re.search(words, err)
    with pytest.raises(CommandError, match=words):
        nodepoolcmd.main(["-c", file, "--strict", *command])


def test_users_9_known_ones_are_quiet(run: Run, plain: ZooKeeper) -> None:
    assert (
        run("info", "cloudy")[1]
        == run("alien-image-list", "cloudy")[1]
        == run("image-unpause", "debian-12")[1]
        == ""
    )
    make_node(plain, provider="long-gone")
    assert run("info", "long-gone")[1] == ""


def test_users_9_image_build(file: str) -> None:
    with pytest.raises(
        CommandError, match=r"Trying to build a non .* image: debian12; did you mean debian-12"
    ):
        nodepoolcmd.main(["-c", file, "image-build", "debian12"])


def test_users_9_a_node_in_use(
    file: str, plain: ZooKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.cmd.commands.nodes.LOCK_TIMEOUT", 0.2)
    node = make_node(plain, state="in-use", allocated_to="100-0000000007")
    plain.lockNode(node, identifier="somebody")
    words = (
        f"node {node.id} is in use \\(state in-use, request 100-0000000007, locked by somebody\\)"
    )
    with pytest.raises(TimeoutException, match=words):
        nodepoolcmd.main(["-c", file, "delete", node.id])
    plain.unlockNode(node)


def test_users_14_several_and_short_ids(run: Run, plain: ZooKeeper) -> None:
    one, two, three = make_node(plain), make_node(plain), make_node(plain)
    out, _err = run("delete", one.id, two.id.lstrip("0") or "0", "999")
    assert out.startswith("Node id 999 not found")
    assert one.id in out and two.id in out and three.id not in out
    assert [plain.getNode(node.id).state for node in (one, two, three)] == [
        "deleting",
        "deleting",
        "ready",
    ]
    run("hold", three.id.lstrip("0"))
    assert plain.getNode(three.id).state == "hold"


def test_users_14_server_id_is_json(run: Run, plain: ZooKeeper) -> None:
    make_node(plain, external_id={"host": "h1", "sliver": "np1"})
    assert '| {"host": "h1", "sliver": "np1"} |' in run("list")[0]


# -- users 10


def broken_driver(tmp_path: pathlib.Path, text: str, name: str = "broken") -> str:
    directory = tmp_path / "drivers" / name
    directory.mkdir(parents=True)
    (directory / "__init__.py").write_text(text)
    return str(directory.parent)


def test_users_10_a_broken_driver_is_quiet(
    zk_chroot: Chroot,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    from nodepool.driver import Drivers

    drivers = broken_driver(tmp_path, "from nodepool.driver.broken.helper import x\n")
    file = zk_chroot.config({**BASE, "drivers-path": [drivers]})
    try:
        assert nodepoolcmd.main(["-c", file, "list"]) == 0
        assert "broken" not in caplog.text + capsys.readouterr().err
        Drivers.drivers = type(Drivers.drivers)()
        caplog.set_level(logging.INFO)
        Drivers.load([drivers])
        (record,) = [record for record in caplog.records if "broken" in record.getMessage()]
        assert record.exc_info is None
        assert (
            "relatively (from . import ...)" in record.getMessage()
            and "install" not in record.getMessage()
        )
        used = [*BASE["providers"], {"name": "other", "driver": "broken", "pools": []}]
        file = zk_chroot.config({**BASE, "drivers-path": [drivers], "providers": used})
        caplog.clear()
        assert nodepoolcmd.main(["-c", file, "list"]) == 0
        assert caplog.text == "", "commands that need no cloud load no driver"
        assert nodepoolcmd.main(["-c", file, "alien-image-list"]) == 0
        assert "provider other is not used: broken: driver cannot be loaded" in caplog.text
    finally:
        Drivers.load([])


def test_users_10_other_missing_modules_are_to_be_installed(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    from nodepool.driver import Drivers

    try:
        Drivers.load([broken_driver(tmp_path, "import no_such_library\n", "needy")])
        assert "install the missing Python module 'no_such_library'" in caplog.text
    finally:
        Drivers.load([])


# -- users 19, 20


@pytest.mark.parametrize(
    ("name", "words"), [("gcee", "did you mean gce?"), ("nodemanger", "did you mean nodemanager?")]
)
def test_users_19_unknown_drivers(
    tmp_path: pathlib.Path, name: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "nodepool.yaml"
    path.write_text(f"labels: []\nproviders:\n  - name: x\n    driver: {name}\n    pools: []\n")
    assert nodepoolcmd.main(["-c", str(path), "config-validate"]) == 1
    assert f"{name}: unknown driver; {words}" in caplog.text


def test_users_19_a_file_that_cannot_be_read(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert nodepoolcmd.main(["-c", str(tmp_path), "config-validate"]) == 1
    assert (
        f"{tmp_path}: cannot be read: Is a directory" in caplog.text and "YAML" not in caplog.text
    )


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            ["request", "create", "a", "--count", "x"],
            "must be a whole number of at least 1 and at most 1000, not 'x'",
        ),
        (
            ["request", "create", "a", "--count", "100000"],
            "must be a whole number of at least 1 and at most 1000, not '100000'",
        ),
        (
            ["request", "create", "a", "--wait", "soon"],
            "must be a number of seconds greater than 0, not 'soon'",
        ),
        (["--connect-timeout", "nan", "list"], "must be a number of seconds"),
        (["image-build", "a", "--wait", "--timeout", "-1"], "must be a number of seconds"),
    ],
)
def test_users_19_wrong_numbers(
    command: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        nodepoolcmd.main(command)
    err = capsys.readouterr().err
    assert words in err and "value:" not in err


def test_users_19_why_zookeeper_cannot_be_reached(
    zk_chroot: Chroot, tmp_path: pathlib.Path
) -> None:
    """The last line names what the connection failed of."""
    ca, key = tmp_path / "other.pem", tmp_path / "other.key"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-subj",
            "/CN=other",
            "-days",
            "2",
            "-keyout",
            str(key),
            "-out",
            str(ca),
        ],
        check=True,
        capture_output=True,
    )
    file = zk_chroot.config(
        {**BASE, "zookeeper-tls": {"ca": str(ca), "cert": zk_chroot.cert, "key": zk_chroot.key}}
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "nodepool.cmd.nodepoolcmd",
            "-c",
            file,
            "--connect-timeout",
            "3",
            "list",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert re.search(
        "No ZooKeeper server answers at .*; the last attempt: .*certificate verify failed", last
    )


def test_users_20_import_names_running_daemons(
    run: Run, zk_chroot: Chroot, tmp_path: pathlib.Path
) -> None:
    from nodepool.zk.components import BuilderComponent

    path = tmp_path / "images.json"
    run("export-image-data", str(path))
    assert run("import-image-data", str(path))[1] == ""
    BuilderComponent(zk_chroot.connect(), "nb01").register()
    assert (
        "daemons are running, which may undo this: builder nb01"
        in run("import-image-data", str(path))[1]
    )
    done = json.loads(run("import-image-data", str(path), "--format", "json")[0])
    assert str(path) in json.dumps(done), "the file, not the last record"


def test_users_section_5_errors_of_main_are_exceptions(file: str) -> None:
    """Refuted: callers of ``main()`` that catch ``Exception`` catch what the command refuses."""
    for command in (
        ["image-build", "nosuch"],
        ["request", "show", "100-1"],
        ["--strict", "info", "nosuch"],
    ):
        try:
            nodepoolcmd.main(["-c", file, *command])
        except Exception as error:
            assert isinstance(error, CommandError) and str(error)
        else:
            raise AssertionError(command)
