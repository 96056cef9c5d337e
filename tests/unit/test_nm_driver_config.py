"""Options of the driver nodemanager (nodemanager.md C.8)."""

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
    return {"name": "metal", "driver": "nodemanager", "cloud-images": [{"name": "host"}],
            "pools": [{"name": "main", "labels": [{"name": "small", "cloud-image": "host"}]}], **options}


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
    config.getSchema()({key: value for key, value in entry.items() if key not in ("name", "driver")})


@pytest.mark.spec("nodemanager.md C.8: discover: hosts from ZooKeeper, and/or hosts")
def test_hosts_or_discover() -> None:
    assert load(hosts=[HOST]).hosts["h1"].url == HOST["url"]
    assert load(discover=True).discover and not load(discover=True).hosts
    assert load(discover=True, hosts=[HOST]).hosts
    for options in ({}, {"hosts": []}, {"discover": False}):
        with pytest.raises(ConfigError, match=r"either hosts .* or discover: true"):
            load(**options)
    schema(discover=True, **TLS)
    schema(hosts=[HOST])


def test_backing_label_is_refused_with_a_reason() -> None:
    with pytest.raises(ConfigError, match="not supported yet"):
        load(**{"backing-label": "big", "hosts": [HOST]})
    with pytest.raises(v.Invalid, match="not supported yet"):
        schema(**{"backing-label": "big"})


@pytest.mark.parametrize("options,text", [
    ({"ca-cert": "x"}, "needed together"), ({"lease-time": 30}, "at least 240"),
    ({"hosts": [{**HOST, "url": "h1:8120"}]}, "no address of a node manager"),
    ({"hosts": [{**HOST, "url": "https://h1:8120"}]}, "https needs ca-cert"), ({"hosts": [HOST, HOST]}, "given twice"),
])
def test_bad_input(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load(**{"discover": True, **options})


def test_certificates_of_the_provider_serve_its_hosts() -> None:
    hosts = [{"name": "h1", "url": "https://h1:8120"}, {"name": "h2", "url": "https://h2:8120", **TLS, "ca-cert": "own"}]
    config = load(hosts=hosts, **TLS)
    assert config.hosts["h1"].ca_cert == "ca" and config.hosts["h2"].ca_cert == "own"


def test_announcements() -> None:
    config = load(discover=True, **TLS)
    found = parse("h1", b'{"api": "https://10.0.0.1:8120", "ssh_address": "10.0.0.1", "group": "rack1", "new": 1}', config)
    assert (found.name, found.url, found.ssh_address, found.group) == ("h1", "https://10.0.0.1:8120", "10.0.0.1", "rack1")
    assert (found.ca_cert, found.client_key, found.expected_name) == ("ca", "key", "h1")
    for data, text in ((b"", "empty"), (b"[]", "."), (b"{", "."), (b"{}", "api must be"),
                       (b'{"api": "http://h:1"}', "api must be"), (b'{"api": "unix:/x", "ssh_address": 1}', "must be texts")):
        with pytest.raises(RecordError, match=text):
            parse("h1", data, config)
    with pytest.raises(RecordError, match="needs ca-cert"):
        parse("h1", b'{"api": "https://10.0.0.1:8120"}', load(discover=True))
