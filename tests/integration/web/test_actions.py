"""What operators and borrowers do on the pages, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nodepool.access.identity import Role
from nodepool.access.tokens import Tokens
from nodepool.lease import Leases
from nodepool.web.actions.actions import Actions
from nodepool.web.server import WebApp
from nodepool.zk import paths
from nodepool.zk.records import HOLD, ImageBuild, ImageUpload
from tests.conftest import wait_for
from tests.integration.web.conftest import Site
from tests.support.browser import Browser, browser
from tests.support.launcher import LauncherBench, config, provider


@pytest.fixture
def site(bench: LauncherBench) -> Iterator[Site]:
    bench.quota(instances=2)
    pool = bench.start(config(provider()))
    app = WebApp(pool, port=0, listen_address="127.0.0.1", actions=Actions(pool, "loopback"))
    app.start()
    try:
        yield Site(bench, pool, app)
    finally:
        app.stop()


def sign_in(seen: Browser, site: Site, role: Role, name: str = "alice") -> str:
    token = Tokens(lambda: site.bench.zk).create(name, role)[1]
    press(seen, "Sign in")
    dialog = seen.page.get_by_role("dialog")
    dialog.get_by_label("Token").fill(token)
    dialog.get_by_role("button", name="Sign in").click()
    seen.sees(f"{name} ({role.name.lower()})")
    return token


def press(seen: Browser, name: str) -> None:
    seen.page.get_by_role("button", name=name, exact=True).first.click()


def agree(seen: Browser, title: str, name: str, **fields: str) -> None:
    """Press a button in the dialog of this title."""
    dialog = seen.page.get_by_role("dialog")
    dialog.get_by_role("heading", name=title).wait_for()
    for label, value in fields.items():
        dialog.get_by_label(label).fill(value)
    dialog.get_by_role("button", name=name, exact=True).click()


def test_visitor_sees_the_commands_and_a_borrower_no_more_than_that(site: Site) -> None:
    _request, (node,) = site.bench.fulfilled("fake-label")
    with browser(site.address) as seen:
        seen.open(f"/ui/node/{node.id}")
        seen.sees(f"nodepool hold {node.id} --for 24h")
        assert seen.accessible() == []
        sign_in(seen, site, Role.BORROW)
        seen.sees(f"nodepool delete {node.id}")
        assert seen.page.get_by_role("button", name="Delete", exact=True).count() == 0
        assert seen.page.context.cookies() == []
        seen.page.reload()
        seen.sees("alice (borrow)")
        press(seen, "Sign out")
        seen.page.get_by_role("button", name="Sign in").wait_for()
        seen.page.reload()
        seen.page.get_by_role("button", name="Sign in").wait_for()


def test_wrong_token_is_refused_in_the_dialog(site: Site) -> None:
    with browser(site.address) as seen:
        seen.open("/ui/nodes")
        press(seen, "Sign in")
        agree(seen, "Sign in", "Sign in", Token="np_0_wrong")
        seen.page.get_by_role("dialog").get_by_role("alert").filter(has_text="oken").wait_for()
        assert seen.accessible() == []
        assert [each for each in seen.errors if "401" not in each] == []
        seen.errors.clear()


@pytest.mark.core
def test_operator_holds_a_node_and_deletes_it_although_it_is_leased(site: Site) -> None:
    request_id, (node,) = site.bench.fulfilled("fake-label")
    site.bench.zk.kazoo_client.delete(paths.request(request_id))
    wait_for(lambda: site.bench.node(node.id).allocated_to is None, what="a free node")
    with browser(site.address) as seen:
        seen.open(f"/ui/node/{node.id}")
        sign_in(seen, site, Role.OPERATE)
        press(seen, "Hold")
        agree(seen, f"Hold node {node.id}?", "Hold", Hours="2", Purpose="bisect")
        seen.sees(f"Hold node {node.id}: accepted")
        [lease] = Leases(site.bench.zk).all()
        assert (lease.terms.owner, lease.terms.purpose, lease.nodes[0].state) == (
            "alice",
            "bisect",
            HOLD,
        )
        press(seen, "Delete")
        agree(seen, f"Delete node {node.id}?", "Delete")
        dialog = seen.page.get_by_role("dialog")
        dialog.get_by_role("alert").filter(has_text="alice has leased node").wait_for()
        dialog.get_by_label("although somebody has leased it").check()
        agree(seen, f"Delete node {node.id}?", "Delete")
        seen.sees(f"Delete node {node.id}: accepted")
        site.bench.wait_gone(node.id)
        assert [each for each in seen.errors if "409" not in each] == []
        seen.errors.clear()


def test_operator_cancels_a_request(site: Site) -> None:
    site.bench.fulfilled("fake-label", "fake-label")
    waiting = site.bench.submit("fake-label")
    with browser(site.address) as seen:
        seen.open("/ui/requests")
        sign_in(seen, site, Role.OPERATE)
        press(seen, "Cancel")  # of the row
        agree(seen, f"Cancel request {waiting}?", "Close")
        seen.page.get_by_role("link", name=waiting).click()
        seen.page.get_by_role("heading", name=f"request {waiting}").wait_for()
        press(seen, "Cancel")
        agree(seen, f"Cancel request {waiting}?", "Cancel")
        seen.sees(f"Cancel request {waiting}: accepted")
        assert site.bench.zuul.request(waiting) is None


def test_operator_builds_and_pauses_an_image_and_deletes_a_build_and_an_upload(site: Site) -> None:
    zk = site.bench.zk
    build = ImageBuild("noble")
    build.state = "ready"
    zk.storeBuild("noble", build, "0000000001")
    upload = ImageUpload("0000000001", "cloud 1", "noble", "0000000001")
    upload.state = "ready"
    path = paths.upload("noble", "0000000001", "cloud 1", "0000000001")
    zk.kazoo_client.create(path, upload.serialize(), makepath=True)
    with browser(site.address) as seen:
        seen.open("/ui/image/noble")
        seen.sees("nodepool dib-image-delete noble-0000000001")
        seen.sees(
            "nodepool image-delete --image noble --build-id 0000000001 --provider 'cloud 1' "
            "--upload-id 0000000001"
        )
        assert seen.accessible() == []
        sign_in(seen, site, Role.OPERATE)
        for action, asked in (("Build", zk.hasBuildRequest), ("Pause", zk.getImagePaused)):
            press(seen, action)
            agree(seen, f"{action} image noble?", action)
            seen.sees(f"{action} image noble: accepted")
            assert asked("noble")
        press(seen, "Resume")
        agree(seen, "Resume image noble?", "Resume")
        seen.sees("Resume image noble: accepted")
        assert not zk.getImagePaused("noble")
        seen.page.get_by_role("region", name="Builds").get_by_role("button", name="Delete").click()
        agree(seen, "Delete build noble 0000000001?", "Delete")
        seen.sees("Delete build noble 0000000001: accepted")
        found = zk.getBuild("noble", "0000000001")
        assert found is not None and found.state == "deleting"
        seen.page.get_by_role("region", name="Builds").get_by_role(
            "button", name="Delete"
        ).wait_for(state="detached")
        seen.page.get_by_role("navigation").get_by_role("link", name="Uploads", exact=True).click()
        press(seen, "Delete")
        agree(seen, "Delete upload noble 0000000001 cloud 1 0000000001?", "Delete")
        seen.sees("Delete upload noble 0000000001 cloud 1 0000000001: accepted")
        found = zk.getImageUpload("noble", "0000000001", "cloud 1", "0000000001")
        assert found is not None and found.state == "deleting"


def test_borrower_leases_renews_and_returns(site: Site) -> None:
    with browser(site.address) as seen:
        seen.open("/ui/leases")
        seen.sees("nodepool lease LABEL --for 4h")
        sign_in(seen, site, Role.BORROW)
        press(seen, "Lease nodes")
        agree(seen, "Lease nodes", "Lease", Labels="fake-label", Hours="1", Purpose="look")
        seen.sees("59 min")
        [lease] = Leases(site.bench.zk).all()
        assert (lease.terms.owner, lease.labels) == ("alice", ("fake-label",))
        assert seen.accessible() == []
        press(seen, "Connect")
        seen.sees("HostName")
        press(seen, "Close")
        press(seen, "Renew")
        agree(seen, f"Renew lease {lease.id}?", "Renew", Hours="6")
        seen.sees("5 h 59 min")
        press(seen, "Return")
        agree(seen, f"Return lease {lease.id}?", "Return")
        seen.sees(f"Return lease {lease.id}: accepted")
        wait_for(lambda: Leases(site.bench.zk).all() == [], what="no lease")
        press(seen, "Lease nodes")
        agree(seen, "Lease nodes", "Lease", Labels="nothing")
        seen.page.get_by_role("dialog").get_by_role("alert").filter(
            has_text="no launcher offers nothing"
        ).wait_for()
        assert [each for each in seen.errors if "422" not in each] == []
        seen.errors.clear()


def test_others_see_a_lease_without_its_buttons(site: Site) -> None:
    with browser(site.address) as seen:
        seen.open("/ui/leases")
        sign_in(seen, site, Role.BORROW)
        press(seen, "Lease nodes")
        agree(seen, "Lease nodes", "Lease", Labels="fake-label")
        seen.page.get_by_role("button", name="Return").wait_for()
        press(seen, "Sign out")
        seen.page.get_by_role("button", name="Return").wait_for(state="detached")
        sign_in(seen, site, Role.BORROW, "bob")
        seen.sees("alice")
        assert seen.page.get_by_role("button", name="Return").count() == 0
