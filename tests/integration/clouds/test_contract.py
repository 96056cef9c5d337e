"""What each of azure, gce and ibmvpc must fulfill (AZU-15, GCE-13, IBM-16)."""

from __future__ import annotations

import base64
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from nodepool.exceptions import ConfigError
from tests.conftest import wait_for
from tests.support.clouds.scene import Azure, Google, Ibm, opened
from tests.support.launcher import LauncherBench


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[Azure]:
    yield from opened(Azure, monkeypatch, tmp_path)


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[Google]:
    yield from opened(Google, monkeypatch, tmp_path)


@pytest.fixture
def ibm(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[Ibm]:
    yield from opened(Ibm, monkeypatch, tmp_path)


# -- azure


def image(name: str = "image", **options: Any) -> dict[str, Any]:
    return {"name": name, "username": "zuul", **options}


def body(
    azure: Azure, bench: LauncherBench, cloud_image: dict[str, Any], **label: Any
) -> dict[str, Any]:
    """What was asked for, for a node of this image."""
    label = azure.label(image=cloud_image["name"], **label)
    bench.start(azure.config(label, **{"cloud-images": [cloud_image]}), cleanup_interval=600)
    bench.fulfilled("small", tenant_name="tenant-a")
    (machine,) = azure.machines()
    return machine.body


@pytest.mark.spec(
    "AZU-15.1: AZU-6: customData and userData are base64; static and dynamic tags; options of the "
    "machine"
)
def test_azure_machine_gets_the_options_of_its_label(azure: Azure, bench: LauncherBench) -> None:
    made = body(
        azure,
        bench,
        image(**{"image-id": "x", "key": "ssh-rsa AAAA"}),
        tags={"team": 7},
        **{
            "dynamic-tags": {"tenant": "{request.tenant_name}"},
            "user-data": "hello user",
            "custom-data": "hello custom",
            "volume-size": 60,
            "use-spot": True,
            "zone": 2,
            "ephemeral-os-disk": True,
            "trusted-launch": True,
            "identities": ["/subscriptions/s/identity"],
            "volume-type": "Premium_LRS",
        },
    )
    properties = made["properties"]
    profile = properties["osProfile"]
    assert base64.b64decode(properties["userData"]) == b"hello user"
    assert base64.b64decode(profile["customData"]) == b"hello custom"
    assert made["tags"]["team"] == "7" and made["tags"]["tenant"] == "tenant-a"
    assert made["tags"]["nodepool_provider_name"] == azure.name
    assert profile["linuxConfiguration"]["disablePasswordAuthentication"] is True
    (key,) = profile["linuxConfiguration"]["ssh"]["publicKeys"]
    assert key == {"path": "/home/zuul/.ssh/authorized_keys", "keyData": "ssh-rsa AAAA"}
    disk = properties["storageProfile"]["osDisk"]
    assert (disk["createOption"], disk["deleteOption"], disk["diskSizeGB"]) == (
        "FromImage",
        "Delete",
        60,
    )
    assert disk["diffDiskSettings"] == {"option": "Local"} and disk["managedDisk"] == {
        "storageAccountType": "Premium_LRS"
    }
    assert (properties["priority"], properties["evictionPolicy"]) == ("Spot", "Delete")
    assert made["zones"] == ["2"] and made["identity"]["userAssignedIdentities"] == {
        "/subscriptions/s/identity": {}
    }
    (interface,) = properties["networkProfile"]["networkInterfaceConfigurations"]
    assert (
        interface["name"].endswith("-nic") and interface["properties"]["deleteOption"] == "Delete"
    )
    (address,) = interface["properties"]["ipConfigurations"]
    public = address["properties"]["publicIPAddressConfiguration"]
    assert public["properties"]["deleteOption"] == "Delete" and public["sku"] == {
        "name": "Standard"
    }


@pytest.mark.spec("AZU-15.2: a min-ready node, with the dynamic tag of a request without tenant")
def test_azure_min_ready(azure: Azure, bench: LauncherBench) -> None:
    content = azure.config(azure.label(**{"dynamic-tags": {"tenant": "{request.tenant_name}"}}))
    content["labels"][0]["min-ready"] = 1
    bench.start(content, cleanup_interval=600)
    bench.wait_nodes(1, state="ready")
    assert azure.machines()[0].body["tags"]["tenant"] == "None"


GALLERY = {"gallery-name": "g", "name": "i", "version": "1"}


@pytest.mark.parametrize(
    ("option", "value", "reference"),
    [
        pytest.param(
            "image-id", "/s/i", {"id": "/s/i"}, marks=pytest.mark.spec("AZU-15.4: exactly that id")
        ),
        pytest.param(
            "community-gallery-image",
            GALLERY,
            {"communityGalleryImageId": "/CommunityGalleries/g/Images/i/Versions/1"},
            marks=pytest.mark.spec("AZU-15.5: a community gallery"),
        ),
        pytest.param(
            "shared-gallery-image",
            GALLERY,
            {"sharedGalleryImageId": "/SharedGalleries/g/Images/i/Versions/1"},
            marks=pytest.mark.spec("AZU-15.6: a shared gallery"),
        ),
        pytest.param(
            "image-filter",
            {"name": "own-1"},
            {"id": "x/own-1"},
            marks=pytest.mark.spec("AZU-15.7: a filter by name"),
        ),
        pytest.param(
            "image-filter",
            {"tags": {"kind": "ci"}},
            {"id": "x/own-2"},
            marks=pytest.mark.spec("AZU-15.8: the last by name of those with a tag"),
        ),
    ],
)
def test_azure_image_options_reference_exactly_that_image(
    azure: Azure, bench: LauncherBench, option: str, value: Any, reference: dict[str, str]
) -> None:
    for name, tags in (
        ("own-1", {"kind": "ci"}),
        ("own-2", {"kind": "ci", "more": "1"}),
        ("own-3", None),
    ):
        thing = {
            "id": f"x/{name}",
            "name": name,
            "location": "centralus",
            "properties": {"provisioningState": "Succeeded"},
        }
        azure.cloud.things["images", name] = {**thing, **({"tags": tags} if tags else {})}
    made = body(azure, bench, image(**{option: value}))
    assert made["properties"]["storageProfile"]["imageReference"] == reference


@pytest.mark.spec(
    "AZU-15.9: a password; AZU-15.10: a generated one has 64 characters; AZU-13: no two are alike"
)
def test_azure_passwords_are_as_configured_or_generated(azure: Azure, bench: LauncherBench) -> None:
    windows = {"image-id": "w", "connection-type": "winrm"}
    images = [
        image("given", password="Pa55word", **windows),
        image("made", **windows, **{"generate-password": True}),
    ]
    labels = [azure.label("given", image="given"), azure.label("made", image="made")]
    bench.start(azure.config(*labels, **{"cloud-images": images}), cleanup_interval=600)
    _, (node, *_others) = bench.fulfilled("given", "made", "made")
    profiles = [each.body["properties"]["osProfile"] for each in azure.machines()]
    assert [each["adminPassword"] for each in profiles if each["adminPassword"] == "Pa55word"] == [
        "Pa55word"
    ]
    made = {each["adminPassword"] for each in profiles} - {"Pa55word"}
    assert len(made) == 2 and all(re.fullmatch("[A-Za-z0-9]{64}", each) for each in made)
    assert {each["adminUsername"] for each in profiles} == {"zuul"}
    assert node.connection_port == 5986


@pytest.mark.spec(
    "AZU-3: a partial account file is told with its remedy; the subnet that is missing, too"
)
def test_azure_bad_account(azure: Azure, bench: LauncherBench) -> None:
    azure.cloud.write_account(subscriptionId=None)
    pool = bench.start(
        azure.config(**{"launch-retries": 1, "network": "other"}), cleanup_interval=600
    )
    bench.wait_request(bench.submit("small"), "failed", timeout=30)
    assert any("has no subscriptionId; create it with" in line for line in pool.getReadiness()[1])
    azure.cloud.write_account()
    pool.getProviderManager(azure.name).cleanupLeakedResources()
    bench.wait_request(bench.submit("small"), "failed", timeout=30)
    assert any("option network" in line for line in pool.getReadiness()[1])


@pytest.mark.spec(
    "AZU-7: both families; resources are right; AZU-5: nothing is asked before it is needed"
)
def test_azure_both_families(azure: Azure, bench: LauncherBench) -> None:
    bench.start(azure.config(pool={"public-ipv6": True}), cleanup_interval=600)
    _, (node,) = bench.fulfilled("small")
    assert (node.public_ipv6, node.resources["ram"]) == ("2001:db8::1", 512)
    assert node.interface_ip == node.public_ipv4


@pytest.mark.spec("AZU-8: AZU-12: a machine that Azure could not make is told with Azure's reason")
def test_failed_azure_machine_is_reported_with_the_reason(
    azure: Azure, bench: LauncherBench
) -> None:
    azure.cloud.sold_out_sizes = {f"{azure.sizes[0]}/1"}
    pool = bench.start(
        azure.config(azure.label(zone="1"), **{"launch-retries": 1}), cleanup_interval=600
    )
    bench.wait_request(bench.submit("small"), "failed", timeout=30)
    assert any("ZonalAllocationFailed: We do not have" in line for line in pool.getReadiness()[1])
    wait_for(lambda: not azure.leftovers(), 20, "nothing left")


@pytest.mark.spec("AZU-4: what the configuration must not say")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"network": None}, "one of network and subnet-id"),
        ({"auth": {"type": "cli", "subscription-id": "s"}}, "cannot be used together"),
        ({"cloud-images": [image(**{"image-id": "x", "image-filter": {}})]}, "exactly one of"),
        ({"auth-path": None}, "one of auth-path and auth"),
    ],
)
def test_invalid_azure_configuration_is_refused(
    azure: Azure, bench: LauncherBench, change: dict[str, Any], text: str
) -> None:
    from nodepool.config import loadConfig

    with pytest.raises(ConfigError, match=text):
        loadConfig(bench.config(azure.config(**change)))


# -- gce


@pytest.mark.spec("GCE-13.1: reloading the configuration twice in a row; GCE-5: body of the call")
def test_google_machine_gets_the_options_of_its_label(google: Google, bench: LauncherBench) -> None:
    label = google.label(
        labels={"team": "ci"},
        **{
            "dynamic-labels": {"tenant": "{request.tenant_name}"},
            "network-tags": ["nodes"],
            "use-spot": True,
            "volume-size": 30,
            "service-account": {"email": "a@b"},
            "user-data": "#cloud-config",
        },
    )
    pool = bench.start(google.config(label), cleanup_interval=600)
    pool.updateConfig()
    pool.updateConfig()
    bench.fulfilled("small", tenant_name="Tenant A")
    (machine,) = google.machines()
    made = machine.body
    items = {item["key"]: item["value"] for item in made["metadata"]["items"]}
    assert items["nodepool_provider_name"] == google.name and items["ssh-keys"].startswith(
        "zuul:ssh-ed25519"
    )
    assert items["user-data"] == "#cloud-config"
    assert made["labels"]["team"] == "ci" and made["labels"]["tenant"] == "tenant-a"
    parameters = made["disks"][0]["initializeParams"]
    assert parameters["diskSizeGb"] == "30" and parameters["diskType"].endswith(
        "/diskTypes/pd-standard"
    )
    assert made["scheduling"]["provisioningModel"] == "SPOT" and made["tags"] == {
        "items": ["nodes"]
    }
    assert made["serviceAccounts"][0]["email"] == "a@b"


@pytest.mark.spec(
    "GCE-13.3: GCE-8: a region's quota of one instance: the second waits, and is served afterwards"
)
def test_request_waits_for_quota_of_a_google_region(google: Google, bench: LauncherBench) -> None:
    google.cloud.quotas["INSTANCES"] = 1
    bench.start(google.config(), cleanup_interval=600)
    first, _ = bench.fulfilled("small")
    second = bench.submit("small")
    wait_for(lambda: bench.zuul.request(second)["state"] == "pending", 20, "the second waits")
    bench.use_up(first)
    bench.wait_request(second, "fulfilled", timeout=30)
    bench.use_up(second)


@pytest.mark.spec(
    "GCE-13.4: an empty answer about a machine type raises KeyError, and all of them are asked for "
    "anew"
)
def test_google_machine_type(
    google: Google, bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.start(google.config(), cleanup_interval=600)
    adapter = bench.adapter(google.name)
    size = adapter._getQuotaForMachineType
    assert size("n1-standard-1").quota["compute"]["cores"] == 1
    asked = len(google.proxy.requests)
    size("n1-standard-1")
    assert len(google.proxy.requests) == asked
    with monkeypatch.context() as patch:
        patch.setattr(google.cloud, "machineTypes_get", lambda **_more: {})
        with pytest.raises(KeyError):
            size("n1-standard-4")
    size("n1-standard-1")
    assert len(google.proxy.requests) == asked + 2


@pytest.mark.spec(
    "GCE-10: a name that is taken: by a former attempt for the same node it is adopted, by others "
    "it is left alone"
)
def test_google_taken_name(google: Google, bench: LauncherBench) -> None:
    foreign = {
        "name": "np0000000000",
        "machineType": "n1-standard-1",
        "networkInterfaces": [{}],
        "metadata": {},
    }
    with google.cloud.lock:
        google.cloud.new_machine("np0000000000", foreign, google.zones[0])
    pool = bench.start(google.config(**{"launch-retries": 1}), cleanup_interval=600)
    bench.wait_request(bench.submit("small"), "failed", timeout=30)
    assert any("already exists" in line for line in pool.getReadiness()[1])
    wait_for(lambda: not bench.nodes(), 20, "no record")
    assert bench.adapter(google.name).remove("np0000000000") is False
    assert [each.body for each in google.machines()] == [foreign]


def marks_of_a_lost_node(provider: str) -> dict[str, str]:
    """Marks of a machine that was created for the first node before ZooKeeper was restored."""
    return {
        "nodepool_provider_name": provider,
        "nodepool_node_id": "0000000000",
        "nodepool_node_created": "1000",
    }


@pytest.mark.spec(
    "GCE-10: LAU-13.3: a node that got the id of a lost one does not adopt its machine"
)
def test_google_machine_of_a_lost_node_is_not_adopted(google: Google, bench: LauncherBench) -> None:
    items = [
        {"key": key, "value": value} for key, value in marks_of_a_lost_node(google.name).items()
    ]
    lost = {
        "name": "np0000000000",
        "machineType": "n1-standard-1",
        "networkInterfaces": [{}],
        "metadata": {"items": items},
    }
    with google.cloud.lock:
        google.cloud.new_machine("np0000000000", lost, google.zones[0])
    pool = bench.start(google.config(**{"launch-retries": 1}), cleanup_interval=600)
    bench.wait_request(bench.submit("small"), "failed", timeout=30)
    assert any("already exists" in line for line in pool.getReadiness()[1])
    wait_for(lambda: not bench.nodes(), 20, "no record")
    assert [each.body for each in google.machines()] == [lost]


@pytest.mark.spec(
    "AZU-8: LAU-13.3: a node that got the id of a lost one does not replace its machine"
)
def test_azure_machine_of_a_lost_node_is_not_replaced(azure: Azure, bench: LauncherBench) -> None:
    lost = {"location": "centralus", "tags": marks_of_a_lost_node(azure.name), "properties": {}}
    with azure.cloud.lock:
        azure.cloud.new_machine("np0000000000", lost)
    pool = bench.start(azure.config(**{"launch-retries": 1}), cleanup_interval=600)
    bench.wait_request(bench.submit("small"), "failed", timeout=30)
    assert any(
        "exists already and belongs to another node" in line for line in pool.getReadiness()[1]
    )
    wait_for(lambda: not bench.nodes(), 20, "no record")
    assert [each.body for each in azure.machines()] == [lost]


@pytest.mark.spec("AZU-8: a machine of the same name that is of others is left alone")
def test_azure_taken_name(azure: Azure, bench: LauncherBench) -> None:
    foreign = {
        "location": "centralus",
        "tags": {"nodepool_provider_name": "theirs"},
        "properties": {},
    }
    with azure.cloud.lock:
        azure.cloud.new_machine("np0000000000", foreign)
    bench.start(azure.config(), cleanup_interval=600)
    assert bench.adapter(azure.name).remove("np0000000000") is False
    assert [each.body for each in azure.machines()] == [foreign]


@pytest.mark.spec("GCE-7: a machine that is gone already; GCE-6: preempted while starting")
def test_preempted_google_machine_is_launched_again(google: Google, bench: LauncherBench) -> None:
    google.cloud.paused = True
    bench.start(google.config(google.label(**{"use-spot": True})), cleanup_interval=600)
    request = bench.submit("small")
    (machine,) = wait_for(google.machines, 20, "a machine")
    machine.halted = True
    google.cloud.paused = False
    wait_for(lambda: machine not in google.machines(), 30, "it is deleted")
    bench.wait_request(request, "failed", "fulfilled", timeout=30)


@pytest.mark.spec("GCE-4: what the configuration must not say; GCE-3: rate by either name")
def test_invalid_google_configuration_is_refused(google: Google, bench: LauncherBench) -> None:
    from nodepool.config import loadConfig

    def load(**change: Any) -> Any:
        return loadConfig(bench.config(google.config(**change))).providers[google.name]

    assert load(rate=None, **{"rate-limit": 7}).zones == [google.zones[0]]
    for change, text in (
        ({"cloud-images": [image()]}, "needs image-id, or image-project"),
        ({"zone": "europe-west1-b"}, "is not in region"),
        (
            {"object-storage": None, "diskimages": [{"name": "fake-image"}]},
            "diskimages need object-storage",
        ),
    ):
        with pytest.raises(ConfigError, match=text):
            load(**change)


# -- ibmvpc


@pytest.mark.spec(
    "IBM-16.1: a private label by image name; IBM-8: fields; IBM-9: setting it used deletes it; "
    "IBM-6: groups and names"
)
def test_ibm_node_with_a_private_address_is_ready(ibm: Ibm, bench: LauncherBench) -> None:
    bench.start(ibm.config(**{"public-ipv4": False}), cleanup_interval=600)
    request, (node,) = bench.fulfilled("small")
    assert (node.state, node.connection_type, node.host_keys, node.python_path) == (
        "ready",
        "ssh",
        [],
        "auto",
    )
    assert (node.cloud, node.region, node.az) == ("IBM", "us-south", "us-south-1")
    assert node.public_ipv4 is None and node.interface_ip == node.private_ipv4
    assert f"np_{ibm.name}_main" in ibm.cloud.groups.values()
    (machine,) = ibm.machines()
    assert machine.body["keys"] == [{"id": "key-1"}] and machine.body["vpc"] == {"id": "vpc-1"}
    bench.use_up(request)
    assert ibm.leftovers() == []


@pytest.mark.spec("IBM-16.3: IBM-7: a label by image filter takes the newest that matches")
def test_ibm_image_filter_takes_the_newest_match(ibm: Ibm, bench: LauncherBench) -> None:
    wanted = {
        "operating-system": {"family": "Debian", "version": "12"},
        "owner-type": "provider",
        "status": "available",
    }
    images = [image(**{"image-filter": wanted})]
    bench.start(ibm.config(**{"cloud-images": images}), cleanup_interval=600)
    request, _ = bench.fulfilled("small")
    assert ibm.machines()[0].body["image"] == {"id": "i-2"}
    bench.use_up(request)


@pytest.mark.spec("IBM-10: memory of profiles is GiB, and limits are MiB")
def test_ibm_memory_is_counted_in_mib(ibm: Ibm, bench: LauncherBench) -> None:
    bench.start(ibm.config(quota={"ram": 6000}), cleanup_interval=600)
    first, (node,) = bench.fulfilled("small")
    assert node.resources["ram"] == 4096
    second = bench.submit("small")
    wait_for(
        lambda: bench.zuul.request(second)["state"] == "pending", 20, "the second does not fit"
    )
    bench.use_up(first)
    bench.wait_request(second, "fulfilled", timeout=30)


@pytest.mark.spec(
    "IBM-11: an empty bucket, one that is missing, and groups of others are no errors"
)
@pytest.mark.parametrize("there", [True, False])
def test_ibm_listing_accepts_missing_buckets_and_groups_of_others(
    ibm: Ibm, bench: LauncherBench, there: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if there:
        ibm.cloud.make_bucket()
    bench.start(ibm.config(), cleanup_interval=600)
    with ibm.cloud.lock:
        machine = ibm.cloud.new_machine("np0000000099", {"profile": {"name": "gone"}}, ibm.zones[0])
        machine.facts["group"] = {"id": "of-others"}
    adapter = bench.adapter(ibm.name)
    assert [each.metadata for each in adapter.listResources()] == [{}]
    assert [each.quota.get_resources()["instances"] for each in adapter.listInstances()] == [1]
    assert "Cannot list" not in caplog.text


@pytest.mark.spec(
    "IBM-3: IBM-13: what is missing in the credentials is told; IBM-4: names that would make leaks "
    "invisible are refused"
)
def test_invalid_ibm_configuration_is_refused(ibm: Ibm, bench: LauncherBench) -> None:
    from nodepool.config import loadConfig

    for change, text in (
        ({"name": "a_b"}, "letters, digits and dashes only"),
        ({"pool": {"name": "a_b"}}, "letters, digits and dashes only"),
        ({"zone": None}, "needs zone"),
    ):
        with pytest.raises(ConfigError, match=text):
            loadConfig(bench.config(ibm.config(**change)))
    ibm.cloud.credentials.write_text(f"VPC_URL={ibm.cloud.url}\n")
    pool = bench.start(ibm.config(**{"launch-retries": 1}), cleanup_interval=600)
    bench.wait_request(bench.submit("small"), "failed", timeout=30)
    assert any("has no VPC_APIKEY" in line for line in pool.getReadiness()[1])


# -- what tests of others replace


def intercept(monkeypatch: pytest.MonkeyPatch, scene: Any, hosts: dict[str, str]) -> set[str]:
    """Calls of public hosts go to the stand-in, below requests. Returns the hosts that were
    called.
    """
    import requests.adapters

    asked: set[str] = set()
    real = requests.adapters.HTTPAdapter.send

    def send(self: Any, request: Any, *args: Any, **keywords: Any) -> Any:
        for host, address in hosts.items():
            if request.url.startswith(host):
                asked.add(host)
                request.url = request.url.replace(host, address, 1)
        return real(self, request, *args, **keywords)

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", send)
    return asked


@pytest.mark.spec("AZU-14: HTTP is intercepted below requests at the public hosts")
def test_azure_http_can_be_intercepted_at_the_public_hosts(
    azure: Azure, bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    login, management = "https://login.microsoftonline.com", "https://management.azure.com"
    azure.cloud.resource = f"{management}/"
    azure.cloud.write_account(
        activeDirectoryEndpointUrl=login, resourceManagerEndpointUrl=f"{management}/"
    )
    asked = intercept(monkeypatch, azure, {login: azure.cloud.url, management: azure.cloud.url})
    bench.start(azure.config(), cleanup_interval=600)
    request, _ = bench.fulfilled("small")
    bench.use_up(request)
    assert asked == {login, management}


@pytest.mark.spec(
    "IBM-15: HTTP is intercepted below requests at the public hosts, with a token from the "
    "environment"
)
def test_ibm_http_can_be_intercepted_at_the_public_hosts(
    ibm: Ibm, bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for service in ("VPC", "RESOURCE_MANAGER", "RESOURCE_CONTROLLER"):
        monkeypatch.setenv(f"{service}_AUTH_TYPE", "bearerToken")
        monkeypatch.setenv(f"{service}_BEARER_TOKEN", "fake-token")
    ibm.cloud.tokens.add("fake-token")
    vpc, groups = "https://us-south.iaas.cloud.ibm.com", "https://resource-controller.cloud.ibm.com"
    asked = intercept(monkeypatch, ibm, {vpc: ibm.cloud.url, groups: ibm.cloud.url})
    bench.start(ibm.config(**{"credentials-file": None}), cleanup_interval=600)
    request, _ = bench.fulfilled("small")
    bench.use_up(request)
    assert asked == {vpc, groups}


@pytest.mark.spec("PY-6.5")
def test_google_is_asked_at_its_public_host(
    google: Google, bench: LauncherBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE")
    host = "https://compute.googleapis.com"
    asked = intercept(monkeypatch, google, {host: google.cloud.url})
    bench.start(google.config(), cleanup_interval=600)
    request, _ = bench.fulfilled("small")
    bench.use_up(request)
    assert asked == {host}
