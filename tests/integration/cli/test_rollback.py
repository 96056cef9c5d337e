"""``image-rollback`` and ``image-rollforward`` (BLD-22)."""

from __future__ import annotations

import json
import time

import pytest

from nodepool.cmd import nodepoolcmd
from nodepool.cmd.commands.context import CommandError, user
from nodepool.zk import paths
from nodepool.zk.history import HistoryReader
from tests.integration.cli.test_commands import (
    config,
    make_build,
    make_node,
    make_upload,
    plain,
    rows,
    run,
)

__all__ = ["config", "plain", "rows", "run"]
IMAGE = "fake-image"


@pytest.fixture
def uploads(plain):
    """Two builds with an upload to providers p and q each; the last one is current."""
    made = []
    for age in (100, 50):
        build = make_build(plain)
        for provider in ("p", "q"):
            number = make_upload(plain, build, provider)
            record = plain.getImageUpload(IMAGE, build, provider, number)
            record.state_time = time.time() - age
            plain.storeImageUpload(IMAGE, build, provider, record, number)
        made.append(build)
    return made


def used(plain, provider="p"):
    return plain.getMostRecentImageUpload(IMAGE, provider).build_id


@pytest.mark.spec("CLI-5.21; BLD-22.1")
def test_rollback_and_rollforward_are_reported_per_provider(run, plain, uploads):
    old, new = uploads
    assert run("image-rollback", IMAGE, "--reason", "no network") == "".join(
        f"Provider {provider} uses upload 0000000000 of build {old} instead of 0000000000 of "
        f"{new}\n"
        for provider in "pq"
    )
    assert used(plain) == used(plain, "q") == old
    (row,) = json.loads(
        "[" + run("image-rollforward", IMAGE, "--provider", "q", "--format", "json") + "]"
    )
    assert row == {
        "image": IMAGE,
        "provider": "q",
        "build": new,
        "upload": "0000000000",
        "instead_of": old,
        "result": "used",
        "message": f"Provider q uses upload 0000000000 of build {new} instead of 0000000000 of "
        f"{old}",
    }
    assert used(plain) == old and used(plain, "q") == new


@pytest.mark.spec("CLI-5.21; CLI-5.19")
def test_rollback_is_audited(run, plain, uploads):
    run("image-rollback", IMAGE)
    (event,) = HistoryReader().read(plain.kazoo_client, "image", IMAGE)
    assert (event["action"], event["target"], event["result"], event["owner"]) == (
        "image-rollback",
        f"image {IMAGE}",
        "ok",
        user(),
    )


@pytest.mark.spec("CLI-5.21; BLD-22.2")
def test_second_rollback_names_the_first_operator_and_fails(run, plain, uploads):
    old, new = uploads
    run("image-rollback", IMAGE, "--reason", "no network")
    with pytest.raises(CommandError) as refused:
        run("image-rollback", IMAGE)
    assert (
        f"nothing was changed for image {IMAGE}: p: {user()} has rolled back from build {new} to "
        f"{old} already: no network; q: " in str(refused.value)
    )
    run("image-rollforward", IMAGE)
    with pytest.raises(CommandError, match=f"p: no roll-back is in force; build {new} is used"):
        run("image-rollforward", IMAGE)


@pytest.mark.spec("CLI-5.21; BLD-22.2")
def test_rollback_fails_in_part_if_a_provider_has_no_earlier_upload(run, plain, uploads):
    old, new = uploads
    make_upload(plain, new, "r")
    run("image-rollback", IMAGE, status=1)
    assert used(plain) == old and used(plain, "r") == new


@pytest.mark.parametrize("command", ["image-rollback", "image-rollforward"])
@pytest.mark.spec("CLI-5.21")
def test_unknown_images_and_providers_are_errors(run, plain, uploads, command):
    with pytest.raises(CommandError, match=r"image nothing is neither in .* nor in ZooKeeper"):
        run(command, "nothing")
    with pytest.raises(CommandError, match="has no usable upload at provider x"):
        run(command, IMAGE, "--provider", "x")
    with pytest.raises(CommandError, match="image paused-image has no usable upload"):
        run(command, "paused-image")


@pytest.mark.spec("CLI-5.21")
def test_free_nodes_of_the_replaced_build_are_named(config, plain, uploads, capsys):
    old, new = uploads
    path = paths.upload(IMAGE, new, "p", "0000000000")
    free = make_node(plain, image_id=path)
    make_node(plain, image_id=path, allocated_to="200-0000000001")
    make_node(plain, image_id=path, state="in-use")
    make_node(plain, image_id=paths.upload(IMAGE, old, "p", "0000000000"))
    assert nodepoolcmd.main(["-c", config, "image-rollback", IMAGE]) == 0
    assert capsys.readouterr().err == (
        "nodepool: free nodes of the replaced build remain until they are used; to replace them, "
        f"run `nodepool delete {free.id}`\n"
    )


@pytest.mark.spec("CLI-5.2: the output of 11.0.0 does not change; BLD-22.6")
def test_details_show_the_rollback_and_the_list_does_not(run, rows, plain, uploads):
    old, new = uploads
    run("image-rollback", IMAGE, "--provider", "p", "--reason", "no network")
    assert {len(row) for row in rows("image-list")} == {8}
    reasons = {(row[0], row[2]): row[9] for row in rows("image-list", "--detail")}
    assert reasons == {
        (old, "p"): "",
        (old, "q"): "",
        (new, "q"): "",
        (new, "p"): f"rolled back to build {old} by {user()}: no network",
    }
    shown = run("explain", "image", IMAGE)
    assert f"rolled back to build {old} by {user()}: no network (" in shown
    run("image-rollforward", IMAGE)
    reasons = {(row[0], row[2]): row[9] for row in rows("image-list", "--detail")}
    assert reasons[new, "p"] == (
        f"rolled back to build {old} by {user()}, undone since: no network"
    )
    assert "rolled back" not in run("explain", "image", IMAGE)
