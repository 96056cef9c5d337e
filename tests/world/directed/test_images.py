"""Cloud images and uploaded images (LAU-21: unmanaged_image, dib_upload_fail, vhd)."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.support.launcher import LauncherBench, config, provider


def dib(bench: LauncherBench, *names: str) -> dict[str, Any]:
    return {
        "diskimages": [{"name": n, "elements": ["x"], "username": "zuul"} for n in names],
        "elements-dir": ".",
        "images-dir": str(bench.tmp),
    }


@pytest.mark.spec("LAU-21.66, LAU-21.67unmanaged_image_provider_id; OST-3.6")
def test_cloud_images_give_their_connection_to_nodes(
    bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [
        {"name": "Fake Precise"},
        {"name": "by-name", "image-name": "Fake Precise", "username": "u"},
        {
            "name": "by-id",
            "image-id": "provider-id",
            "python-path": "/usr/bin/python3",
            "shell-type": "cmd",
        },
    ]
    labels = [
        {"name": f"label-{i}", "cloud-image": image["name"], "min-ram": 1}
        for i, image in enumerate(images)
    ]
    bench.start(
        config(provider(**{"cloud-images": images}, pools=[{"name": "main", "labels": labels}]))
    )
    looked_up: list[str] = []
    adapter = bench.adapter("fake-provider")
    original = adapter._findImage
    monkeypatch.setattr(
        adapter, "_findImage", lambda name: (looked_up.append(name), original(name))[1]
    )  # type: ignore[func-returns-value]
    plain, named, by_id = (bench.fulfilled(f"label-{i}")[1][0] for i in range(3))
    assert (plain.username, named.username, by_id.username) == (None, "u", None)
    assert (plain.image_id, named.image_id, by_id.image_id) == ("Fake Precise", "by-name", "by-id")
    assert (by_id.python_path, by_id.shell_type) == ("/usr/bin/python3", "cmd")
    cloud = bench.cloud("fake-provider")
    assert cloud.get_server(by_id.external_id)["image"] == {"id": "provider-id"}
    assert cloud.get_server(named.external_id)["image"]["id"] == "fake-image-id"
    assert "provider-id" not in looked_up


@pytest.mark.spec("LAU-21.66: images appearing later are found; OST-3.7")
def test_a_cloud_image_that_appears_later(bench: LauncherBench) -> None:
    bench.start(
        config(
            provider(
                **{"cloud-images": [{"name": "late", "image-name": "Late Image"}]},
                pools=[
                    {
                        "name": "main",
                        "labels": [{"name": "fake-label", "cloud-image": "late", "min-ram": 1}],
                    }
                ],
            )
        )
    )
    bench.adapter("fake-provider").IMAGE_CHECK_TIMEOUT = 0
    bench.wait_request(bench.submit("fake-label"), "failed")
    bench.cloud("fake-provider").create_image(name="Late Image")

    def served() -> bool:
        return bench.wait_request(bench.submit("fake-label"))["state"] == "fulfilled"  # type: ignore[no-any-return]

    wait_for(served)


@pytest.mark.spec("ZK-11: the ready upload with the greatest state_time is used; OST-3.5")
def test_the_newest_ready_upload_is_used(bench: LauncherBench) -> None:
    bench.store_image("img", "fake-provider", external_id="old", state_time=time.time() - 50)
    newest = bench.store_image(
        "img", "fake-provider", external_id="new", state_time=time.time() - 10
    )
    bench.store_image("img", "fake-provider", external_id="uploading", state="uploading")
    bench.store_image("img", "other", external_id="other")
    bench.start(
        config(
            provider(
                diskimages=[{"name": "img", "connection-type": "network_cli"}],
                pools=[
                    {
                        "name": "main",
                        "labels": [{"name": "fake-label", "diskimage": "img", "min-ram": 1}],
                    }
                ],
            ),
            **dib(bench, "img"),
        )
    )
    node = bench.fulfilled("fake-label")[1][0]
    assert bench.cloud("fake-provider").get_server(node.external_id)["image"] == {"id": "new"}
    assert node.image_id.endswith(f"{newest.build_id}/providers/fake-provider/images/{newest.id}")
    assert (node.username, node.connection_type) == ("zuul", "network_cli")
    # The next one with a later upload.
    bench.store_image("img", "fake-provider", external_id="newer")
    wait_for(
        lambda: (
            bench.pools[0]
            .zk.getMostRecentImageUpload("img", "fake-provider", cached=True)
            .external_id
            == "newer"
        )
    )
    node = bench.fulfilled("fake-label")[1][0]
    assert bench.cloud("fake-provider").get_server(node.external_id)["image"] == {"id": "newer"}


@pytest.mark.spec("LAU-21.39, LAU-21.40, LAU-21.41; OST-3.23, OST-3.24")
def test_each_provider_uses_its_own_upload(bench: LauncherBench) -> None:
    """Uploads to two clouds in two formats, later a third cloud whose upload failed."""
    bench.store_image("img", "fake-vhd", external_id="v", format="vhd")
    bench.store_image("img", "fake-qcow2", external_id="q", format="qcow2")
    bench.store_image("img", "fake-raw", external_id=None, state="failed")  # type: ignore[arg-type]
    names = ("fake-vhd", "fake-qcow2", "fake-raw")
    providers = []
    for name in names:
        labels = [{"name": x, "diskimage": "img", "min-ram": 1} for x in ("common", f"on-{name}")]
        providers.append(
            provider(
                name,
                diskimages=[{"name": "img"}],
                pools=[{"name": "main", "labels": labels}],
                cloud=name,
            )
        )
    pool = bench.start(config(*providers, labels={"common": {"min-ready": 2}}, **dib(bench, "img")))
    for name, external_id in (("fake-vhd", "v"), ("fake-qcow2", "q")):
        node = bench.fulfilled(f"on-{name}")[1][0]
        assert node.cloud == name
        assert bench.cloud(name).get_server(node.external_id)["image"] == {"id": external_id}
        assert pool.config.providers[name].image_type == external_id.replace("v", "vhd").replace(
            "q", "qcow2"
        )
    bench.wait_request(bench.submit("on-fake-raw"), "failed")
    ready = bench.wait_nodes(2, state="ready", allocated_to=None, type=["common"])
    assert "fake-raw" not in {n.provider for n in ready}


@pytest.mark.spec("LAU-21.34; OST-3.23")
def test_boot_from_volume(bench: LauncherBench) -> None:
    bench.start(config(provider(label={"boot-from-volume": True, "volume-size": 7})))
    request_id, nodes = bench.fulfilled("fake-label")
    assert nodes[0].resources == {
        "cores": 4,
        "instances": 1,
        "ram": 8192,
        "volumes": 1,
        "volume-gb": 7,
    }
    assert [v.size for v in bench.cloud("fake-provider").list_volumes()] == [7]
    bench.use_up(request_id)
    assert not bench.cloud("fake-provider").list_volumes()
