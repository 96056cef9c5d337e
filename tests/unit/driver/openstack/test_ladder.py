"""Flavors and zones of a label that are tried in order (OST-1.8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nodepool import exceptions
from nodepool.driver.fake.adapter import FakeAdapter, FakeOpenStackCloud
from nodepool.driver.fake.cloud import _creation_error, _http_error
from nodepool.driver.fake.objects import Dummy
from nodepool.driver.openstack.ladder import offers_of
from tests.support.openstack.fake import advance, advance_until, create

Over = Callable[[FakeOpenStackCloud], FakeAdapter]
QUOTA = _http_error("ForbiddenException", "Quota exceeded for cores", 403)
NO_HOST = "No valid host was found. There are not enough hosts available."


class Cloud(FakeOpenStackCloud):
    """Flavors ``small`` and ``large`` (twice as much), of which some are sold out in some zones."""

    def __init__(self) -> None:
        super().__init__()
        self._flavor_list = [
            Dummy(Dummy.FLAVOR, id="1", ram=1024, name="small", vcpus=1),
            Dummy(Dummy.FLAVOR, id="2", ram=2048, name="large", vcpus=2),
        ]
        #: Flavor and zone -> the error of a creation, or the fault of an accepted server.
        self.refused: dict[tuple[str, str], Exception | str] = {}
        self.asked: list[tuple[str, str]] = []

    def create_server(self, name: str = "", **kwargs: Any) -> Dummy:
        self.asked.append((kwargs["flavor"]["name"], kwargs.get("availability_zone") or "any"))
        refusal = self.refused.get(self.asked[-1])
        if isinstance(refusal, Exception):
            raise refusal
        server = super().create_server(name, **kwargs)
        if refusal is not None:
            server.status, server["fault"] = "ERROR", {"message": refusal}
        return server


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()


@pytest.fixture
def adapter(over: Over, cloud: Cloud) -> FakeAdapter:
    return over(cloud)


@pytest.fixture
def label(fake_provider: Any) -> Any:
    label = fake_provider.pools["main"].labels["fake-label"]
    label.flavor_name, label.min_ram, label.boot_from_volume = "small", 0, False
    label.alternatives = [{"flavor-name": "large"}]
    return label


def flavors(name: str | None, min_ram: int) -> dict[str, str]:
    return {"name": f"{name or 'any'}{f'>{min_ram}' if min_ram else ''}"}


def offered(label: Any, az: str | None = None) -> list[str]:
    return [offer.describe() for offer in offers_of(label, az, flavors)]


def test_label_without_alternatives_has_one_offer_in_the_zone_of_the_request(label: Any) -> None:
    label.alternatives = []
    assert offered(label) == ["small"]
    assert offered(label, "az2") == ["small in az2"]
    label.azs = ["az1", "az2"]
    assert offered(label, "az2") == ["small in az2"]
    assert {*offered(label, "az3")} < {"small in az1", "small in az2"}


def test_alternatives_stay_in_the_zone_of_the_request_unless_zones_are_named(label: Any) -> None:
    assert offered(label, "az2") == ["small in az2", "large in az2"]
    label.azs = ["az1", "az2"]
    assert offered(label, "az2") == ["small in az2", "small in az1", "large in az2", "large in az1"]
    label.azs = None
    label.alternatives = [
        {"availability-zones": ["az1", "az2", "az3"], "flavor-names": ["large", "huge"]},
        {"availability-zone": "az4"},
    ]
    assert offered(label, "az3") == [
        "small in az3",
        "large in az3",
        "large in az1",
        "large in az2",
        "huge in az3",
        "huge in az1",
        "huge in az2",
        "small in az4",
    ]


def test_min_ram_of_the_label_applies_to_its_alternatives(label: Any) -> None:
    label.flavor_name, label.min_ram = None, 1024
    assert offered(label) == ["any>1024", "large>1024"]


def test_offers_of_labels_with_demands_on_hosts_are_their_own(label: Any) -> None:
    label.server_group = "spread"
    assert offered(label) == ["small for label fake-label", "large for label fake-label"]


@pytest.mark.parametrize("refusal", [QUOTA, _http_error("ConflictException", NO_HOST, 409)])
def test_creation_that_is_refused_is_tried_with_the_next_flavor(
    adapter: FakeAdapter, cloud: Cloud, label: Any, refusal: Exception
) -> None:
    cloud.refused["small", "az1"] = refusal
    instance = advance(create(adapter, label, az="az1"))
    assert cloud.asked == [("small", "az1"), ("large", "az1")]
    assert instance.getQuotaInformation().get_resources() == {
        "instances": 1,
        "cores": 2,
        "ram": 2048,
    }
    advance(create(adapter, label, az="az1"))
    assert cloud.asked[2:] == [("large", "az1")], "what is sold out is not tried again"


def test_server_without_a_host_makes_the_next_attempt_use_the_next_flavor(
    adapter: FakeAdapter, cloud: Cloud, label: Any
) -> None:
    cloud.refused["small", "az1"] = NO_HOST
    machine = create(adapter, label, az="az1")
    with pytest.raises(exceptions.OfferRefusedException, match=r"small in az1: .*another offer"):
        advance(machine)
    assert machine.external_id is not None, "the launcher deletes it first"
    advance(create(adapter, label, az="az1"))
    assert cloud.asked == [("small", "az1"), ("large", "az1")]


def test_server_without_a_host_is_a_lack_of_capacity_when_all_offers_are_sold_out(
    adapter: FakeAdapter, cloud: Cloud, label: Any
) -> None:
    cloud.refused = {("small", "az1"): NO_HOST, ("large", "az1"): NO_HOST}
    with pytest.raises(exceptions.OfferRefusedException):
        advance(create(adapter, label, az="az1"))
    with pytest.raises(exceptions.CapacityException):
        advance(create(adapter, label, az="az1"))
    cloud.refused.clear()
    advance(create(adapter, label, az="az1"))
    assert cloud.asked[2:] == [("small", "az1")], "the one refused longest ago"
    assert list(adapter.sold_out.left()) == ["large in az1"]


def test_accepted_server_alone_does_not_clear_the_memory(
    adapter: FakeAdapter, cloud: Cloud, label: Any
) -> None:
    for offer in offers_of(label, "az1", adapter._findFlavor):
        adapter.sold_out.refused(offer)
    cloud.pause_creates = True
    machine = create(adapter, label, az="az1")
    advance_until(machine, machine.SERVER_CREATING)
    assert len(adapter.sold_out.left()) == 2
    machine.abandon()


def test_server_that_exists_in_spite_of_a_refused_creation_is_deleted_before_the_next(
    adapter: FakeAdapter, cloud: Cloud, label: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = cloud.create_server

    def fail(**kwargs: Any) -> Any:
        server = make(**kwargs)
        server.status, server["fault"] = "ERROR", {"message": "Quota exceeded for volumes"}
        raise _creation_error(server.id)

    monkeypatch.setattr(cloud, "create_server", fail)
    machine = create(adapter, label, az="az1")
    with pytest.raises(exceptions.OfferRefusedException, match="small in az1: Quota exceeded"):
        advance(machine)
    assert cloud.asked == [("small", "az1")]
    assert machine.external_id is not None, "the launcher deletes it first"


def test_no_second_server_is_created_while_one_of_the_attempt_exists(
    adapter: FakeAdapter, cloud: Cloud, label: Any
) -> None:
    error: Any = _http_error("ConflictException", NO_HOST, 409)
    error.resource_id = cloud.create_server("other", flavor={"id": "1", "name": "small"}).id
    cloud.asked.clear()
    cloud.refused["small", "az1"] = error
    machine = create(adapter, label, az="az1")
    with pytest.raises(exceptions.CapacityException):
        advance(machine)
    assert (machine.external_id, cloud.asked) == (error.resource_id, [("small", "az1")])


def test_label_with_one_offer_fails_as_before(
    adapter: FakeAdapter, cloud: Cloud, label: Any
) -> None:
    label.alternatives = []
    cloud.refused["small", "az1"] = NO_HOST
    for _ in range(2):
        with pytest.raises(exceptions.CapacityException, match="No capacity for the server: No"):
            advance(create(adapter, label, az="az1"))
    cloud.refused["small", "az1"] = QUOTA
    with pytest.raises(exceptions.QuotaException, match="Quota exceeded: Quota exceeded for"):
        advance(create(adapter, label, az="az1"))
    assert adapter.sold_out.left() == {}


def test_message_names_the_flavor_that_the_cloud_refuses(
    adapter: FakeAdapter, cloud: Cloud, label: Any
) -> None:
    cloud.refused["small", "az1"] = NO_HOST
    with pytest.raises(exceptions.OfferRefusedException):
        advance(create(adapter, label, az="az1"))
    cloud.refused["large", "az1"] = _http_error(
        "BadRequestException", "Flavor's disk is too small", 400
    )
    with pytest.raises(exceptions.LaunchNodepoolException, match=r"flavor-name \(large\)"):
        advance(create(adapter, label, az="az1"))


def test_values_that_the_cloud_repeats_are_not_logged(
    adapter: FakeAdapter, cloud: Cloud, label: Any, caplog: pytest.LogCaptureFixture
) -> None:
    text = "Invalid input for field/attribute user_data. Value: s3cret"
    cloud.refused["small", "az1"] = _http_error("BadRequestException", text, 400)
    with pytest.raises(exceptions.LaunchNodepoolException):
        advance(create(adapter, label, az="az1"))
    assert "the cloud refuses small in az1: " in caplog.text
    assert "s3cret" not in caplog.text


def test_quota_before_the_launch_is_the_minimum_of_the_offers(
    adapter: FakeAdapter, label: Any
) -> None:
    assert adapter.getQuotaForLabel(label).get_resources() == {
        "instances": 1,
        "cores": 1,
        "ram": 1024,
    }
    label.alternatives = [{"flavor-name": "gone"}]
    with pytest.raises(exceptions.RuntimeConfigurationException, match="'gone'"):
        adapter.getQuotaForLabel(label)
