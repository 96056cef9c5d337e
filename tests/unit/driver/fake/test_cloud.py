"""The fake cloud and, over it, the OpenStack adapter: FAK-1, OST-2."""

from __future__ import annotations

import math
import threading

import pytest

from nodepool import config as npconfig
from nodepool import exceptions
from nodepool.driver import Drivers
from nodepool.driver.fake import adapter as fake
from nodepool.driver.fake import api as fakeapi
from nodepool.driver.fake import cloud as fakecloud
from nodepool.driver.openstack import adapter as openstack
from nodepool.driver.openstack.api import client
from nodepool.driver.openstack.leaks import LeakCleaner
from tests import FIXTURES
from tests.conftest import wait_for
from tests.support.openstack.fake import (
    ADDRESS,
    LOG,
    METADATA,
    FloatingCloud,
    Request,
    advance,
    advance_until,
    create,
)

pytestmark = pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")


@pytest.fixture
def provider(fake_provider):
    return fake_provider


@pytest.fixture
def adapter(provider):
    adapter = Drivers.get("fake").getAdapter(provider)
    yield adapter
    adapter.stop()


@pytest.fixture
def label(provider):
    return provider.pools["main"].labels["fake-label"]


class TestLaunch:
    @pytest.mark.spec("OST-3.4, OST-3.5: metadata, addresses, resources of a launched server")
    def test_create_and_delete(self, adapter, label):
        label.instance_properties = {"a": "b", "nodepool_pool_name": "hidden"}
        label.dynamic_instance_properties = {
            "tenant": "{request.tenant_name}",
            "bad": "{request.nope}",
        }
        machine = create(adapter, label, az="az2")
        assert machine.state == "start"
        advance_until(machine, "creating server")
        external_id = machine.external_id
        assert external_id
        instance = advance(machine)
        assert instance.external_id == external_id
        assert (instance.public_ipv4, instance.private_ipv4, instance.interface_ip) == (
            "fake",
            "fake",
            "fake",
        )
        assert (instance.public_ipv6, instance.host_id) == ("", "fake")
        assert (instance.cloud, instance.region, instance.az) == ("fake", "region-1", "az2")
        assert instance.getQuotaInformation().get_resources() == {
            "cores": 4,
            "instances": 1,
            "ram": 8192,
        }
        assert instance.metadata == {
            "groups": "cloud-1,fake-image,fake-label",
            "a": "b",
            "tenant": "None",
            **METADATA,
        }
        assert [item.external_id for item in adapter.listInstances()] == [machine.external_id]
        assert [(item.type, item.id) for item in adapter.listResources()] == [
            ("instance", machine.external_id)
        ]
        server = adapter._getServer(machine.external_id)
        assert server["metadata"]["nodepool_node_id"] == "1"
        assert server["security_groups"] == ["default"]
        delete = adapter.getDeleteStateMachine(machine.external_id, LOG)
        advance(delete)
        assert adapter._listServers() == []
        advance(adapter.getDeleteStateMachine(machine.external_id, LOG))
        advance(adapter.getDeleteStateMachine(None, LOG))

    @pytest.mark.spec("OST-3.8: IPv6 network gives public_ipv6 and an IPv6 interface address")
    def test_ipv6_network_gives_an_ipv6_interface_address(self, adapter, label):
        label.networks = ["fake-ipv6-network-name"]
        instance = advance(create(adapter, label))
        assert (instance.public_ipv6, instance.interface_ip, instance.host_id) == (
            "fake_v6",
            "fake_v6",
            "fake_host_id",
        )
        label.networks = ["no-auto-ip-network-name"]
        instance = advance(create(adapter, label))
        assert (instance.public_ipv4, instance.private_ipv4, instance.interface_ip) == (
            "",
            "fake",
            "fake",
        )

    def test_boot_from_volume(self, adapter, provider):
        label = provider.pools["main"].labels["cloud-label"]
        label.cloud_image = provider.cloud_images["by-id"]
        instance = advance(create(adapter, label, image=None))
        expected = {"cores": 4, "instances": 1, "ram": 8192, "volumes": 1, "volume-gb": 70}
        assert instance.getQuotaInformation().get_resources() == expected
        assert adapter.getQuotaForLabel(label).get_resources() == expected
        assert next(iter(adapter.listInstances())).getQuotaInformation().get_resources() == expected
        assert len(adapter._listVolumes()) == 1
        advance(adapter.getDeleteStateMachine(instance.external_id, LOG))
        assert adapter._listVolumes() == []

    @pytest.mark.spec("OST-3.14: an over-quota error during creation raises QuotaException")
    def test_over_quota_error_raises_quota_exception(self, adapter, label, monkeypatch):
        monkeypatch.setattr(
            fake.FakeOpenStackCloud, "_get_quota", staticmethod(lambda: (100, 1, 1000))
        )
        advance(create(adapter, label))
        with pytest.raises(exceptions.QuotaException):
            advance(create(adapter, label))
        monkeypatch.setattr(
            fake.FakeOpenStackCloud, "_get_quota", staticmethod(lambda: (100, -1, 1000))
        )
        advance(create(adapter, label))
        assert adapter.getQuotaLimits().get_resources()["instances"] == math.inf

    @pytest.mark.spec("OST-3.15: an immediately failing creation whose fault mentions quota")
    def test_failed_creation_has_a_fault_that_mentions_quota(self, provider, label, monkeypatch):
        monkeypatch.setattr(fake.FakeAdapter, "fake_cloud", fake.FakeLaunchAndGetFaultCloud)
        adapter = fake.FakeAdapter(provider)
        machine = create(adapter, label)
        with pytest.raises(exceptions.QuotaException):
            advance(machine)
        assert machine.external_id == adapter._listServers()[0]["id"]
        adapter.stop()

    def test_fails_with_external_id(self, adapter, label):
        adapter.createServer_fails_with_external_id = 1
        machine = create(adapter, label)
        with pytest.raises(Exception, match="fakeid"):
            advance(machine)
        assert machine.external_id == "fakeid"
        adapter.createServer_fails = 1
        machine = create(adapter, label)
        with pytest.raises(Exception, match="Expected createServer exception"):
            advance(machine)
        assert machine.external_id is None
        assert advance(create(adapter, label))

    def test_current_sdk_error(self, adapter, label, monkeypatch):
        from openstack import exceptions as sdk

        server = adapter._client.create_server(name="x")
        server.status = "ERROR"
        server["fault"] = {"message": "Nova: Quota hit"}

        def fail(**kw):
            raise sdk.SDKException("Error in creating the server", extra_data={"server": server})

        monkeypatch.setattr(adapter._client, "create_server", fail)
        machine = create(adapter, label)
        with pytest.raises(exceptions.QuotaException):
            advance(machine)
        assert machine.external_id == server.id

    @pytest.mark.spec("OST-3.16: failing creations and deletions")
    def test_launch_and_delete_fail(self, provider, label, monkeypatch):
        monkeypatch.setattr(
            fake.FakeAdapter,
            "fake_cloud",
            lambda *a: fake.FakeLaunchAndDeleteFailCloud(times_to_fail=1),
        )
        adapter = fake.FakeAdapter(provider)
        machine = create(adapter, label)
        with pytest.raises(exceptions.LaunchStatusException):
            advance(machine)
        with pytest.raises(Exception, match="fail delete"):
            advance(adapter.getDeleteStateMachine(machine.external_id, LOG))
        advance(adapter.getDeleteStateMachine(machine.external_id, LOG))
        assert adapter._client.delete_success
        advance(create(adapter, label))
        assert adapter._client.launch_success
        adapter.stop()

    @pytest.mark.spec(
        "OST-3.18: Zones changed in the cloud: one request fails, the next uses the new"
    )
    def test_changed_zones_fail_one_request_only(self, adapter, label):
        assert adapter.getAZs() == ["az1", "az2"]
        adapter._client._azs = ["new"]
        assert adapter.getAZs() == ["az1", "az2"]
        with pytest.raises(Exception, match="zone"):
            advance(create(adapter, label, az="az1"))
        assert adapter.getAZs() == ["new"]
        adapter._forget()
        adapter._client._azs = []
        assert adapter.getAZs() == [None]

    def test_a_refusal_makes_nobody_else_ask(self, adapter, label, monkeypatch):
        """One label is refused again and again; what it is not about is not asked for again, nor
        anything too often.
        """
        cloud, asked, texts = (
            adapter._client,
            [],
            ["Invalid key_name provided.", "made up", "made up"],
        )

        def refuse(**kw):
            raise fakecloud._http_error("BadRequestException", texts.pop(0), 400)

        create(adapter, label)
        adapter.getAZs()
        adapter._findImage("other")
        for name in ("list_flavors", "list_availability_zone_names", "get_image"):
            original = getattr(cloud, name)
            monkeypatch.setattr(
                cloud,
                name,
                lambda *a, _name=name, _call=original, **kw: (asked.append(_name), _call(*a, **kw))[
                    1
                ],
            )
        monkeypatch.setattr(cloud, "create_server", refuse)
        for wanted in ([], ["list_availability_zone_names", "list_flavors"], []):
            asked.clear()
            with pytest.raises(Exception, match="refuses to create"):
                advance(create(adapter, label))
            assert sorted(asked) == wanted
        assert texts == []

    @pytest.mark.spec("LAU-10: neither loop may block on slow calls")
    def test_older_answers_serve_while_a_refused_launch_asks_again(
        self, adapter, label, monkeypatch
    ):
        cloud, asked, answered = adapter._client, threading.Event(), threading.Event()
        zones, flavors = cloud.list_availability_zone_names, cloud.list_flavors

        def slowly(call):
            def ask(*args, **kw):
                asked.set()
                assert answered.wait(20)
                return call(*args, **kw)

            return ask

        assert adapter.getAZs() == ["az1", "az2"]
        refused = create(adapter, label, az="az1")
        monkeypatch.setattr(cloud, "list_availability_zone_names", slowly(zones))
        monkeypatch.setattr(cloud, "list_flavors", slowly(flavors))
        cloud._azs = ["new"]
        refused.advance()
        assert asked.wait(20)
        try:
            # As the pools' threads and the create loop do.
            assert adapter.getAZs() == ["az1", "az2"]
            assert create(adapter, label).flavor
            assert adapter.getQuotaForLabel(label)
        finally:
            answered.set()
        with pytest.raises(exceptions.LaunchNodepoolException, match="availability-zones"):
            advance(refused)
        assert adapter.getAZs() == ["new"]

    def test_paused_and_failing_servers_of_the_fake_cloud_are_waited_for(
        self, adapter, label, monkeypatch
    ):
        cloud = adapter._client
        cloud.pause_creates = True
        machine = create(adapter, label)
        looks = count_looks(cloud, monkeypatch)
        wait_for(
            lambda: machine.advance() or len(looks) > 10,
            what="looks for longer than a server takes",
        )
        assert machine.state == "creating server"
        cloud.pause_creates = False
        for server in cloud._server_list:
            server.event.set()
        advance(machine)
        cloud._create_server_timeout = 1
        machine = create(adapter, label)
        advance_until(machine, "creating server")
        assert adapter._getServer(machine.external_id).status == "BUILD"
        adapter._getServer(machine.external_id).status = "ERROR"
        with pytest.raises(exceptions.LaunchStatusException):
            advance(machine)

    @pytest.mark.spec("OST-3.20, OST-3.21: DELETED counts as gone, ERROR does not")
    def test_status_deleted_counts_as_deleted(self, adapter, label):
        instance = advance(create(adapter, label))
        server = adapter._getServer(instance.external_id)
        server.status = "DELETED"
        advance(adapter.getDeleteStateMachine(instance.external_id, LOG))
        assert len(adapter._listServers()) == 1
        assert list(adapter.listInstances()) == []
        assert list(adapter.listResources()) == []
        server.status = "ERROR"
        assert len(list(adapter.listInstances())) == 1

    def test_a_thousand_machines_are_created_and_deleted(self, adapter, label, monkeypatch):
        monkeypatch.setattr(
            fake.FakeOpenStackCloud, "_get_quota", staticmethod(lambda: (1e6, -1, 1e9))
        )

        def run(machines):
            left = set(machines)

            def advance_all():
                for machine in list(left):
                    machine.advance()
                    if machine.complete:
                        left.remove(machine)
                return not left

            wait_for(advance_all, what="the end of all machines")

        launches = [create(adapter, label) for _ in range(1000)]
        run(launches)
        assert len(adapter._listServers()) == 1000
        run([adapter.getDeleteStateMachine(machine.external_id, LOG) for machine in launches])
        assert adapter._listServers() == []


class TestImagesAndLabels:
    @pytest.mark.spec("OST-3.25: Image metadata from both levels arrive at the cloud image")
    def test_image_metadata_of_both_levels_arrive(self, adapter, tmp_path):
        image_id = adapter.uploadImage(
            None,
            "img",
            str(tmp_path / "x.qcow2"),
            image_format="qcow2",
            metadata={"nodepool_build_id": "1"},
            sha256="s",
        )
        image = adapter._client.get_image(image_id)
        assert image["properties"] == {"nodepool_build_id": "1"}
        assert image._kw["disk_format"] == "qcow2"
        assert image._kw["sha256"] == "s"
        assert image._kw["timeout"] == 3600
        assert image_id in [item["id"] for item in adapter._listImages()]
        adapter.deleteImage(external_id=image_id)
        assert adapter._client.get_image(image_id) is None

    def test_upload_with_should_fail_fails(self, adapter):
        with pytest.raises(Exception, match="SHOULD_FAIL"):
            adapter.uploadImage(None, "img", "x.raw", metadata={"SHOULD_FAIL": "true"})

    def test_fake_cloud_fails_the_chosen_uploads(self):
        cloud = fake.FakeUploadFailCloud(times_to_fail=1)
        with pytest.raises(exceptions.BuilderError):
            cloud.create_image(name="a")
        assert cloud.create_image(name="a")
        cloud = fake.FakeUploadFailCloud(fail_callback=lambda **kw: kw["name"] == "bad")
        assert cloud.create_image(name="good")
        with pytest.raises(exceptions.BuilderError):
            cloud.create_image(name="bad")
        cloud = fake.FakeDeleteImageFailCloud()
        with pytest.raises(RuntimeError):
            cloud.delete_image("fake-image-id")
        cloud._fail = False
        assert cloud.delete_image("fake-image-id")

    @pytest.mark.spec(
        "OST-3.7: a cloud image that appears later is noticed within IMAGE_CHECK_TIMEOUT"
    )
    def test_label_becomes_ready_when_its_image_appears(self, adapter, provider, caplog):
        labels = provider.pools["main"].labels
        assert adapter.labelReady(labels["fake-label"]) is False
        label = labels["cloud-label"]
        adapter.IMAGE_CHECK_TIMEOUT = 1000
        assert adapter.labelReady(label) is False
        adapter._client.create_image(name="Windows 11")
        assert adapter.labelReady(label) is True
        adapter._client._image_list.clear()
        adapter._forget()
        assert adapter.labelReady(label) is False
        adapter._client.create_image(name="Windows 11")
        assert adapter.labelReady(label) is False
        adapter.IMAGE_CHECK_TIMEOUT = 0
        assert adapter.labelReady(label) is False
        assert caplog.text.count("Label cloud-label") == 2  # once for each time it disappeared
        assert adapter.labelReady(label) is True
        label.cloud_image = provider.cloud_images["by-id"]
        assert adapter.labelReady(label) is True

    def test_image_missing_at_launch(self, adapter, provider):
        label = provider.pools["main"].labels["cloud-label"]
        with pytest.raises(exceptions.LaunchNodepoolException, match="Windows 11"):
            create(adapter, label, image=None)

    @pytest.mark.spec("OST-2.2: flavors by RAM and name")
    def test_flavors_are_found_by_ram_and_name(self, adapter):
        adapter._client._flavor_list = [
            {"id": "3", "name": "large big", "ram": 300, "vcpus": 3},
            {"id": "1", "name": "small", "ram": 100, "vcpus": 1},
            {"id": "2", "name": "medium big", "ram": 200, "vcpus": 2},
        ]
        assert adapter._findFlavor(None, 100)["id"] == "1"
        assert adapter._findFlavor("big", 100)["id"] == "2"
        assert adapter._findFlavor("big", 201)["id"] == "3"
        assert adapter._findFlavor("small", 0)["id"] == "1"
        assert adapter._findFlavor("2", 0)["id"] == "2"
        for name, ram in (("big", 0), ("small", 200), (None, 1000)):
            with pytest.raises(Exception, match="Unable to find flavor"):
                adapter._findFlavor(name, ram)

    @pytest.mark.spec("OST-2.5: an unknown flavor is counted as far as it is known and logged once")
    def test_unknown_flavor_is_logged_once(self, adapter, label, caplog):
        instance = advance(create(adapter, label))
        adapter._getServer(instance.external_id)["flavor"] = {"id": "gone"}
        for _ in range(2):
            quota = next(iter(adapter.listInstances())).getQuotaInformation()
            assert quota.get_resources() == {"cores": 0, "instances": 1, "ram": 0}
        assert caplog.text.count("Flavor gone") == 1

    def test_limits_contain_volumes_if_the_cloud_has_a_volume_service(self, adapter, monkeypatch):
        monkeypatch.setattr(
            fake.FakeOpenStackCloud, "_get_volume_quota", staticmethod(lambda: (-1, 7))
        )
        assert adapter.getQuotaLimits().get_resources() == {
            "cores": 100,
            "instances": 20,
            "ram": 1000000,
            "volumes": math.inf,
            "volume-gb": 7,
        }

        class EndpointNotFound(Exception):
            pass

        def no_volumes():
            raise EndpointNotFound

        monkeypatch.setattr(adapter._client, "get_volume_limits", no_volumes)
        assert "volumes" not in adapter.getQuotaLimits().get_resources()

    def test_console_log_is_read_only_if_the_label_wants_it(self, adapter, label, monkeypatch):
        monkeypatch.setattr(
            fake.FakeOpenStackCloud,
            "_get_server_console",
            staticmethod(lambda name: "hello\nthere"),
        )
        assert adapter.getConsoleLog(label, "x") == "hello\nthere"
        label.console_log = False
        assert adapter.getConsoleLog(label, "x") is None


class TestLeaks:
    @pytest.mark.spec(
        "OST-3.22: DOWN ports: removed after two sightings and the interval, leaked.ports = 2"
    )
    def test_down_ports_are_removed_after_two_sightings(self, adapter, provider):
        now = [100.0]
        counted = []
        cleaner = LeakCleaner(adapter, provider, LOG, clock=lambda: now[0])
        cleaner._count = lambda what, number: counted.append((what, number))  # type: ignore[method-assign]
        cleaner.clean_ports()
        assert len(adapter._listPorts("DOWN")) == 2
        now[0] += 600
        cleaner.clean_ports()
        assert len(adapter._listPorts("DOWN")) == 2
        adapter._client._down_ports.append(
            fake.Dummy("Port", id="new", status="DOWN", device_owner="")
        )
        adapter._client._down_ports.append(
            fake.Dummy("Port", id="r", status="DOWN", device_owner="network:router")
        )
        now[0] += 1
        cleaner.clean_ports()
        assert [port.id for port in adapter._listPorts("DOWN")] == ["new", "r"]
        assert counted == [("ports", 2)]
        provider.port_cleanup_interval = 0
        now[0] += 1000
        cleaner.clean_ports()
        assert len(adapter._listPorts("DOWN")) == 2

    def test_errors_are_logged(self, adapter, provider, monkeypatch, caplog):
        monkeypatch.setattr(adapter._client, "list_ports", lambda **kw: 1 / 0)
        adapter.periodic()
        assert "ZeroDivisionError" in caplog.text


class TestListing:
    def test_server_has_attributes_and_items(self):
        server = openstack.NodepoolOpenStackServer({"id": "1", "accessIPv4": "1.2.3.4"})
        assert server.access_ipv4 == "1.2.3.4"
        server.private_v4 = "10.0.0.1"
        assert server["private_v4"] == "10.0.0.1"
        assert server.public_v6 is None
        with pytest.raises(AttributeError):
            _ = server.nope

    def test_raw_listing_of_the_fake(self):
        cloud = fake.FakeOpenStackCloud()
        server = cloud.create_server(name="x", meta={"a": "b"}, boot_from_volume=True)
        listed = cloud.compute.get("/servers/detail").json()["servers"]
        assert listed[0]["id"] == server.id
        assert listed[0]["metadata"] == {"a": "b"}
        assert {
            "hostId",
            "OS-EXT-AZ:availability_zone",
            "os-extended-volumes:volumes_attached",
        } <= set(listed[0])


def count_looks(cloud, monkeypatch, fails=0):
    """The ids that the cloud is asked for from now on; the first of these questions fail."""
    asked, get_server = [], cloud.get_server_by_id

    def get(server_id):
        asked.append(server_id)
        if len(asked) <= fails:
            raise RuntimeError("the call failed")
        return get_server(server_id)

    monkeypatch.setattr(cloud, "get_server_by_id", get)
    return asked


class TestAdapter:
    @pytest.mark.spec("LAU-10: neither loop may block on slow calls")
    def test_slow_creation_blocks_no_loop(self, adapter, label):
        cloud, go_on, make_server = (
            adapter._client,
            threading.Event(),
            adapter._client.create_server,
        )

        def slow(**kw):
            assert go_on.wait(10)
            return make_server(**kw)

        cloud.create_server = slow
        machine = create(adapter, label)
        for _ in range(2):
            machine.advance()
            assert machine.state == "submit creating server"
            assert machine.waiting_future is not None
        go_on.set()
        instance = advance(machine)
        assert instance.public_ipv4 == "fake"
        advance(adapter.getDeleteStateMachine(instance.external_id, LOG))
        assert adapter._client._server_list == []
        assert adapter._completeApi(adapter._submitApi(lambda: 1)) in (None, 1)

    def test_polls_that_fail_do_not_end_the_launch(self, adapter, label, monkeypatch):
        asked = count_looks(adapter._client, monkeypatch, fails=3)
        assert advance(create(adapter, label))
        assert len(asked) > 3

    @pytest.mark.spec("OST-2.3.4, OST-2.4: floating IP")
    def test_floating_ip_is_attached_and_deleted_with_its_server(self, over, label):
        label.pool.auto_floating_ip = True
        adapter = over(FloatingCloud())
        instance = advance(create(adapter, label))
        server = adapter._getServer(instance.external_id)
        assert [item["addr"] for item in server["addresses"]["private"]] == ["fake", ADDRESS]
        advance(adapter.getDeleteStateMachine(instance.external_id, LOG))
        assert adapter._client._floating_ip_list == []
        assert adapter._client._server_list == []

    @pytest.mark.spec("OST-3.9: auto-floating-ip false")
    def test_no_floating_ip(self, over, label):
        adapter = over(FloatingCloud())
        advance(create(adapter, label))
        assert adapter._client._floating_ip_list == []

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.spec("OST-3.2: pm.adapter._client.auth equals the auth section of the named cloud")
    def test_client_has_the_auth_section_of_its_cloud(self, tmp_path, provider):
        path = tmp_path / "nodepool.yaml"
        path.write_text("providers: [{name: real, cloud: real-cloud}]")
        real = npconfig.loadConfig(str(path)).providers["real"]
        adapter = Drivers.get("openstack").getAdapter(real)
        try:
            assert adapter._client.auth["username"] == "real"
        finally:
            adapter.stop()


@pytest.mark.spec("FAK-3: the example driver works")
def test_the_fake_api_replaces_every_call():
    """One that it inherits would send requests."""
    calls = {*vars(client.CloudApi), *vars(client.ImageApi), "has"}
    assert {name for name in calls if not name.startswith("_")} <= set(vars(fakeapi.FakeApi))


def test_example_driver_creates_and_deletes(provider):
    config = npconfig.loadConfig(str(FIXTURES / "config" / "complete.yaml"), {"NODEPOOL_PORT": "1"})
    example = config.providers["example-1"]
    example.rate_limit = 0
    adapter = Drivers.get("example").getAdapter(example)
    label = example.pools["main"].labels["example-label"]
    machine = adapter.getCreateStateMachine(
        "np1", label, None, dict(METADATA), Request(), None, LOG
    )
    instance = advance(machine)
    assert instance.metadata == METADATA
    assert instance.interface_ip == "fake"
    assert [item.external_id for item in adapter.listInstances()] == [instance.external_id]
    advance(adapter.getDeleteStateMachine(instance.external_id, LOG))
    assert list(adapter.listResources()) == []
    adapter.stop()
