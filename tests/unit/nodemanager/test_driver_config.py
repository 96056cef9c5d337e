"""Options of the driver nodemanager (NM-C.8)."""

from __future__ import annotations

from typing import Any

import pytest
import voluptuous as v

from nodepool.config import Config, ConfigError
from nodepool.driver.nodemanager import NodeManagerDriver
from nodepool.driver.nodemanager.config import NodeManagerProviderConfig
from nodepool.driver.nodemanager.discovery import parse
from nodepool.zk.records import RecordError

HOST = {"name": "h1", "url": "unix:/run/nodepool/nodemanager.api"}
TLS = {"ca-cert": "ca", "client-cert": "cert", "client-key": "key"}


def provider(**options: Any) -> dict[str, Any]:
    return {
        "name": "metal",
        "driver": "nodemanager",
        "cloud-images": [{"name": "host"}],
        "pools": [{"name": "main", "labels": [{"name": "small", "cloud-image": "host"}]}],
        **options,
    }


def load(**options: Any) -> NodeManagerProviderConfig:
    config = Config()
    config.setLabels([{"name": "small"}])
    config.setProviders([provider(**options)])
    result = config.providers["metal"]
    assert isinstance(result, NodeManagerProviderConfig)
    return result


def schema(**options: Any) -> None:
    entry = provider(**options)
    config = NodeManagerDriver().getProviderConfig(entry)
    config.getSchema()(
        {key: value for key, value in entry.items() if key not in ("name", "driver")}
    )


@pytest.mark.spec("NM-C.8: discover: hosts from ZooKeeper, and/or hosts")
def test_hosts_or_discover() -> None:
    assert load(hosts=[HOST]).hosts["h1"].url == HOST["url"]
    assert load(discover=True).discover and not load(discover=True).hosts
    assert load(discover=True, hosts=[HOST]).hosts
    for options in ({}, {"hosts": []}, {"discover": False}):
        with pytest.raises(ConfigError, match=r"either hosts .* or discover: true"):
            load(**options)
    schema(discover=True, **TLS)
    schema(hosts=[HOST])


BACKING = {"backing-label": "big", "backing-ssh-key": "/etc/nodepool/key"}


@pytest.mark.spec("NM-C.8: option backing-label: L instead of hosts")
def test_backing_label_replaces_hosts() -> None:
    loaded = load(**BACKING)
    assert loaded.backing is not None and not loaded.manage_images and not loaded.hosts
    options = loaded.backing
    assert (
        options.label,
        options.grace_time,
        options.min_retention_time,
        options.max_age,
        options.max_nodes,
    ) == ("big", 60, 0, None, None)
    assert (
        options.max_slivers == 100
        and loaded._getLabel("big") is options
        and loaded._getLabel("other") is None
    )
    assert (loaded.boot_timeout, loaded.launch_timeout, loaded.placement) == (120, 3600, "pack")
    full = {
        **BACKING,
        "grace-time": 0,
        "min-retention-time": 10,
        "max-age": 20,
        "max-backing-nodes": 3,
        "backing-directory": "/srv/nm",
        "backing-config": {"max-slivers": 5, "network": {"default": "nat"}},
    }
    options = load(**full).backing
    assert (
        options is not None
        and options.max_slivers == 5
        and options.max_nodes == 3
        and options.directory == "/srv/nm"
    )
    schema(**full)
    assert load(**BACKING) == load(**BACKING) != load(**{**BACKING, "grace-time": 5})
    label = {"name": "small", "cloud-image": "host", "backing-label": "huge"}
    loaded = load(**BACKING, pools=[{"name": "main", "labels": [label]}])
    assert (
        loaded.pools["main"].labels["small"].backing_label == "huge"
        and loaded._getLabel("big") is None
    )


@pytest.mark.parametrize(
    "options,text",
    [
        ({"hosts": [HOST]}, "hosts cannot be used together with backing-label"),
        ({"discover": True}, "discover cannot be used together"),
        (TLS, "ca-cert cannot be used together"),
        (
            {"diskimages": [{"name": "deb"}]},
            "diskimages cannot be used .* would not reach machines that are launched later",
        ),
        ({"backing-ssh-key": ""}, "needs backing-ssh-key"),
        ({"backing-ssh-key": "key"}, "backing-ssh-key must be an absolute path"),
        ({"backing-directory": "/"}, "backing-directory must be an absolute path"),
        (
            {"max-age": 5, "min-retention-time": 10},
            "max-age must be greater than or equal to min-retention-time",
        ),
        ({"backing-config": {"state-dir": "/x"}}, "backing-config: state-dir cannot be set"),
        ({"backing-config": {"max-slivers": 0}}, "backing-config: max-slivers"),
        ({"backing-config": {"ssh": {"ports": "x"}}}, "must be a range of ports"),
        (
            {
                "backing-config": {
                    "sources": [{"zookeeper": {"servers": [{"host": "zk"}], "insecure": True}}]
                }
            },
            "a backing node cannot read slivers from ZooKeeper",
        ),
        ({"backing-label": "small"}, "is a label of this provider itself"),
    ],
)
def test_backing_label_errors(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load(**{**BACKING, **options})


def test_backing_options_alone_are_of_no_use() -> None:
    with pytest.raises(ConfigError, match="grace-time has no effect without backing-label"):
        load(hosts=[HOST], **{"grace-time": 5})
    label = {"name": "small", "cloud-image": "host", "backing-label": "huge"}
    with pytest.raises(ConfigError, match="needs backing-label of the provider"):
        load(hosts=[HOST], pools=[{"name": "main", "labels": [label]}])
    for wrong in ({"backing-label": 5}, {"max-backing-nodes": 0}, {"grace-time": -1}):
        with pytest.raises(v.Invalid):
            schema(**{**BACKING, **wrong})


@pytest.mark.parametrize(
    "options,text",
    [
        ({"ca-cert": "x"}, "needed together"),
        ({"lease-time": 30}, "at least 240"),
        ({"hosts": [{**HOST, "url": "h1:8120"}]}, "not an address of a node manager"),
        ({"hosts": [{**HOST, "url": "https://h1:8120"}]}, "https needs ca-cert"),
        ({"hosts": [HOST, HOST]}, "listed twice"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load(**{"discover": True, **options})


def test_certificates_of_the_provider_serve_its_hosts() -> None:
    hosts = [
        {"name": "h1", "url": "https://h1:8120"},
        {"name": "h2", "url": "https://h2:8120", **TLS, "ca-cert": "own"},
    ]
    config = load(hosts=hosts, **TLS)
    assert config.hosts["h1"].ca_cert == "ca" and config.hosts["h2"].ca_cert == "own"


def test_announcements_of_hosts_are_parsed_or_refused() -> None:
    config = load(discover=True, **TLS)
    found = parse(
        "h1",
        b'{"api": "https://10.0.0.1:8120", "ssh_address": "10.0.0.1", "group": "rack1", "new": 1}',
        config,
    )
    assert (found.name, found.url, found.ssh_address, found.group) == (
        "h1",
        "https://10.0.0.1:8120",
        "10.0.0.1",
        "rack1",
    )
    assert (found.ca_cert, found.client_key, found.expected_name) == ("ca", "key", "h1")
    for data, text in (
        (b"", "empty"),
        (b"[]", "."),
        (b"{", "."),
        (b"{}", "api must be"),
        (b'{"api": "http://h:1"}', "api must be"),
        (b'{"api": "unix:/x", "ssh_address": 1}', "must be texts"),
        (
            b'{"api": "unix:/x", "ssh_address": "{{a}}"}',
            "ssh_address must be a plain name or address",
        ),
    ):
        with pytest.raises(RecordError, match=text):
            parse("h1", data, config)
    with pytest.raises(RecordError, match="needs ca-cert"):
        parse("h1", b'{"api": "https://10.0.0.1:8120"}', load(discover=True))


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ({}, "label small needs either cloud-image or diskimage"),
        (
            {"cloud-image": "host", "diskimage": "deb"},
            "label small needs either cloud-image or diskimage",
        ),
        ({"cloud-image": "nope"}, "cloud-image nope does not exist in provider metal"),
        ({"diskimage": "nope"}, "diskimage nope does not exist in provider metal"),
        ({"cloud-image": "host", "net-max": "5x"}, "net-max: '5x' is not a rate"),
        ({"cloud-image": "host", "privileges": ["all"]}, "privileges: 'all' is not a privilege"),
    ],
)
def test_invalid_labels_are_refused_with_their_position(label: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        load(hosts=[HOST], pools=[{"name": "main", "labels": [{"name": "small", **label}]}])
    where = refused.value.where
    assert where[where.index("pools") :][:4] == ("pools", 0, "labels", 0)
