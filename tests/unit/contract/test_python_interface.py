"""Names that scripts, plug-ins and test benches import: PY, DRV-5 to DRV-10."""

from __future__ import annotations

import importlib
import inspect
import math
import threading
from typing import Any

import pytest

from tests import REPOSITORY

EMPTY = inspect.Parameter.empty


def find(path: str) -> Any:
    """``module:Name.attribute``."""
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in filter(None, names.split(".")):
        found = getattr(found, name)
    return found


def parameters(path: str) -> dict[str, Any]:
    """Positional parameters and their defaults, ``self`` and ``*args`` omitted."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(find(path)).parameters.items()
        if name != "self"
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }


def check(path: str, expected: str) -> None:
    """``expected`` looks like a call: ``a, b=1``. What follows must have defaults: old callers
    know nothing of it.
    """
    template: dict[str, Any] = {}
    exec(f"from math import inf\ndef f({expected}): pass", template)
    wanted = {name: p.default for name, p in inspect.signature(template["f"]).parameters.items()}
    have = parameters(path)
    assert list(have)[: len(wanted)] == list(wanted), path
    given = {name: default for name, default in wanted.items() if default is not EMPTY}
    assert {name: have[name] for name in given} == given, path
    assert all(default is not EMPTY for name, default in have.items() if name not in wanted), path


@pytest.mark.spec("PY-1: daemon objects")
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("nodepool.launcher:NodePool", "securefile, configfile, watermark_sleep=1"),
        ("nodepool.webapp:WebApp", "nodepool, port=8005, listen_address='0.0.0.0', cache_expiry=1"),
        (
            "nodepool.zk:ZooKeeperClient",
            "hosts, read_only=False, timeout=10.0, tls_cert=None, tls_key=None, tls_ca=None",
        ),
        ("nodepool.zk.zookeeper:ZooKeeper", "client, enable_cache=True"),
        ("nodepool.zk.components:COMPONENT_REGISTRY.clearRegistry", ""),
        ("nodepool.cmd.config_validator:ConfigValidator", "config_file"),
        ("nodepool.nodeutils:iterate_timeout", "max_seconds, exc, purpose, interval=2"),
        ("nodepool.zk.components:PoolComponent", "client, hostname, version=None"),
        ("nodepool.version:get_version_string", ""),
        ("nodepool.provider_manager:get_provider", "provider_config"),
    ],
)
def test_daemons_have_the_signatures_of_the_contract(path: str, expected: str) -> None:
    check(path, expected)


@pytest.mark.spec("PY-1, PY-4: settable attributes of NodePool; LOCK_CLEANUP; connect, disconnect")
def test_daemons_have_the_attributes_of_the_contract() -> None:
    import os

    from nodepool import launcher
    from nodepool.cmd.config_validator import ConfigValidator
    from nodepool.zk import ZooKeeperClient
    from nodepool.zk.components import PoolComponent

    pool = launcher.NodePool(None, "/does/not/exist")
    assert (pool.cleanup_interval, pool.delete_interval, pool.config) == (60, 5, None)
    pool.cleanup_interval, pool.delete_interval = 1, 0.1
    for name in (
        "start",
        "stop",
        "join",
        "is_alive",
        "loadConfig",
        "updateConfig",
        "getZK",
        "getProviderManager",
        "getPoolWorkers",
    ):
        assert callable(getattr(pool, name)), name
    assert isinstance(pool, threading.Thread)
    pool.stop()  # never started
    assert launcher.LOCK_CLEANUP == 28800
    assert parameters("nodepool.cmd.config_validator:ConfigValidator.validate") == {
        "env": os.environ
    }
    assert parameters("nodepool.config:loadConfig") == {"config_path": EMPTY, "env": os.environ}
    assert ConfigValidator("x").validate({}) == 1
    client = ZooKeeperClient("127.0.0.1:1/chroot", insecure=True)
    for name in ("connect", "disconnect"):
        assert callable(getattr(client, name))
    client.disconnect()  # never connected
    assert PoolComponent.RUNNING == "running"
    component = PoolComponent(client, "host")
    assert component.content["hostname"] == "host"
    for name in ("register", "unregister", "id"):
        assert hasattr(component, name), name


@pytest.mark.spec(
    "PY-1: iterate_timeout counts from 1 and raises exc('Timeout waiting for <purpose>')"
)
def test_iterate_timeout_counts_and_raises_as_in_the_contract() -> None:
    from nodepool.exceptions import ServerDeleteTimeoutException
    from nodepool.nodeutils import ITERATE_INTERVAL, iterate_timeout

    assert ITERATE_INTERVAL == 2
    counts = iterate_timeout(60, ServerDeleteTimeoutException, "the server to go", interval=0.01)
    assert [next(counts), next(counts)] == [1, 2]
    counts = iterate_timeout(0.05, ServerDeleteTimeoutException, "the server to go", interval=0.01)
    with pytest.raises(
        ServerDeleteTimeoutException, match=r"^Timeout waiting for the server to go$"
    ):
        list(counts)


@pytest.mark.spec("PY-2: state constants; constructors; attributes and their defaults")
def test_records_have_the_states_constructors_and_defaults_of_the_contract() -> None:
    from nodepool.zk import zookeeper as zk

    names = (
        "BUILDING UPLOADING READY DELETING FAILED REQUESTED FULFILLED PENDING TESTING USED "
        "HOLD INIT ABORTED DELETED"
    )
    assert {name: getattr(zk, name) for name in names.split()} == {
        name: name.lower() for name in names.split()
    }
    assert zk.IN_USE == "in-use"
    for path, expected in {
        "BaseModel": "o_id",
        "ImageBuild": "image_name=None, build_id=None",
        "ImageBuild.fromDict": "d, image_name=None, o_id=None",
        "ImageUpload": "build_id=None, provider_name=None, image_name=None, upload_id=None, "
        "username=None, "
        "python_path=None, shell_type=None",
        "ImageUpload.fromDict": "d, build_id, provider_name, image_name, upload_id",
        "NodeRequest": "id=None",
        "NodeRequest.fromDict": "d, o_id=None",
        "Node": "id=None",
        "Node.fromDict": "d, o_id=None",
        "NodeRequestLockStats": "lock_id=None",
    }.items():
        check(f"nodepool.zk.zookeeper:{path}", expected)
    request = zk.NodeRequest()
    assert (request.declined_by, request.node_types, request.nodes, request.reuse) == (
        [],
        [],
        [],
        True,
    )
    assert (request.requestor, request.provider, request.relative_priority) == (None, None, 0)
    assert (request.event_id, request.tenant_name, request.stat) == (None, None, None)
    node = zk.Node()
    names = (
        "provider pool allocated_to az region cloud public_ipv4 private_ipv4 public_ipv6 "
        "interface_ip host_id image_id "
        "launcher external_id hostname attributes shell_type resources comment hold_job "
        "hold_expiration "
        "user_data driver_data requestor tenant_name slot lock stat"
    )
    for name in names.split():
        assert getattr(node, name) is None, name
    assert (node.type, node.host_keys, node.connection_port) == ([], [], 22)
    assert not node.lock_contenders
    node.type = "one"  # type: ignore[assignment]
    assert node.type == ["one"]
    assert "id" not in zk.Node("1").toDict() and "id" not in zk.NodeRequest("100-1").toDict()
    assert isinstance(node.serialize(), bytes)
    stats = zk.NodeRequestLockStats("100-1")
    assert stats == zk.NodeRequestLockStats("100-1") and stats != zk.NodeRequestLockStats("100-2")
    assert (stats.lock_id, stats.stat) == ("100-1", None)
    build_request = zk.ImageBuildRequest("image", True)
    assert (build_request.image_name, build_request.pending) == ("image", True)


FACADE = {
    "imageBuildLock": "image, blocking=True, timeout=None",
    "imageBuildIdLock": "image, build_id, blocking=True, timeout=None",
    "imageUploadLock": "image, build_id, provider, blocking=True, timeout=None",
    "imageUploadNumberLock": "image_upload, blocking=True, timeout=None",
    "storeBuild": "image, build_data, build_id=None",
    "getBuild": "image, build_id",
    "getBuilds": "image, states=None",
    "getMostRecentBuilds": "count, image, state=None",
    "getBuildIds": "image",
    "getImageNames": "",
    "deleteBuild": "image, build_id",
    "submitBuildRequest": "image",
    "hasBuildRequest": "image",
    "getBuildRequest": "image",
    "removeBuildRequest": "image",
    "storeImageUpload": "image, build_id, provider, image_data, upload_number=None",
    "getImageUpload": "image, build_id, provider, upload_number",
    "getUploads": "image, build_id, provider, states=None",
    "getMostRecentBuildImageUploads": "count, image, build_id, provider, state=None",
    "getMostRecentImageUpload": "image, provider, state='ready', cached=False",
    "getBuildProviders": "image, build_id",
    "getImageUploadNumbers": "image, build_id, provider",
    "getProviderUploads": "provider_name",
    "deleteUpload": "image, build_id, provider, upload_number",
    "getCachedImageUploads": "",
    "storeNodeRequest": "request, priority='100'",
    "getNodeRequest": "request, cached=False",
    "getNodeRequests": "",
    "nodeRequestIterator": "cached=True, cached_ids=False",
    "deleteNodeRequest": "request",
    "lockNodeRequest": "request, blocking=True, timeout=None",
    "unlockNodeRequest": "request",
    "getNodeRequestLockIDs": "",
    "getNodeRequestLockStats": "lock_id",
    "nodeRequestLockStatsIterator": "",
    "deleteNodeRequestLock": "lock_id",
    "storeNode": "node",
    "getNode": "node, cached=False, only_cached=False",
    "getNodes": "",
    "nodeIterator": "cached=True, cached_ids=False",
    "deleteNode": "node",
    "deleteRawNode": "node_id",
    "lockNode": "node, blocking=True, timeout=None, ephemeral=True, identifier=None",
    "unlockNode": "node",
    "forceUnlockNode": "node",
    "getReadyNodesOfTypes": "labels",
    "countPoolNodes": "provider_name, pool_name",
    "getRegisteredPools": "",
    # DRV-8
    "getNodeLockContenders": "node",
    "updateNode": "node",
    "watchNode": "node, callback",
    "deleteOldestUnusedNode": "",  # called with the names by position, see below
    "getProviderNodes": "provider_name",
    "_imageUploadPath": "image, build_id, provider",
    "_nodePath": "",
    "_requestLockPath": "",
    "disconnect": "",
}


@pytest.mark.spec("PY-3: methods of the facade; DRV-8: methods drivers call")
@pytest.mark.parametrize("name", FACADE)
def test_facade_has_the_methods_of_the_contract(name: str) -> None:
    positional = {"deleteOldestUnusedNode": 2, "_nodePath": 1, "_requestLockPath": 1}
    if name in positional:
        assert len(parameters(f"nodepool.zk.zookeeper:ZooKeeper.{name}")) == positional[name]
    else:
        check(f"nodepool.zk.zookeeper:ZooKeeper.{name}", FACADE[name])


@pytest.mark.spec("PY-3; DRV-8: client, kazoo_client, connected, suspended, lost")
def test_facade_has_the_properties_of_the_contract() -> None:
    from nodepool.zk import ZooKeeperClient
    from nodepool.zk.zookeeper import ZooKeeper

    client = ZooKeeperClient("127.0.0.1:1", insecure=True)
    facade = ZooKeeper(client, enable_cache=False)
    assert facade.client is client
    assert hasattr(type(facade), "kazoo_client")
    assert facade.connected is False
    assert isinstance(facade.suspended, bool) and isinstance(facade.lost, bool)


@pytest.mark.spec("PY-4: names of the state machine provider and of pool workers")
def test_providers_have_the_names_of_the_contract() -> None:
    from nodepool.driver.statemachine import StateMachineProvider
    from nodepool.launcher import PoolWorker

    assert (StateMachineProvider.MINIMUM_SLEEP, StateMachineProvider.MAXIMUM_SLEEP) == (1, 1)
    for name in (
        "start",
        "stop",
        "join",
        "idle",
        "startNodeCleanup",
        "listNodes",
        "invalidateQuotaCache",
    ):
        assert callable(getattr(StateMachineProvider, name)), name
    check("nodepool.driver.statemachine:StateMachineProvider", "adapter, provider")
    for name in ("getPoolConfig", "getProviderConfig", "getZK", "getProviderManager"):
        assert callable(getattr(PoolWorker, name)), name


@pytest.mark.spec("PY-5: names of nodepool.config")
def test_configuration_has_the_names_of_the_contract() -> None:
    from nodepool import config as npconfig

    config = npconfig.Config()
    for name in ("labels", "providers", "diskimages", "provider_managers"):
        assert getattr(config, name) == {}, name
    for name in (
        "images_dir",
        "zookeeper_servers",
        "elements_dir",
        "build_log_dir",
        "build_log_retention",
        "max_hold_age",
        "webapp",
        "zookeeper_timeout",
        "zookeeper_tls_cert",
        "zookeeper_tls_key",
        "zookeeper_tls_ca",
        "tenant_resource_limits",
        "config_mtimes",
    ):
        assert hasattr(config, name), name
    config.setDiskImages(
        [{"name": "x", "elements": ["a", "b"], "release": 3, "env-vars": {"A": "1"}}]
    )
    image = config.diskimages["x"]
    assert (image.dib_cmd, image.release, image.elements, image.env_vars) == (
        "disk-image-create",
        "3",
        "a b",
        {"A": "1"},
    )
    label = npconfig.Label()
    assert (label.name, label.min_ready, label.pools) == (None, 0, [])
    check("nodepool.config:ZooKeeperConnectionConfig", "host, port=2181, chroot=None")
    server = npconfig.ZooKeeperConnectionConfig("::1", 2281, "/x")
    assert npconfig.buildZooKeeperHosts([server]) == "[::1]:2281/x"
    plain = npconfig.DiskImage("x")
    assert (
        plain.name,
        plain.build_timeout,
        plain.python_path,
        plain.rebuild_age,
        plain.username,
    ) == ("x", 28800, "auto", 86400, "zuul")
    assert (plain.env_vars, plain.meta, plain.image_types, plain.keep_image_types) == (
        {},
        {},
        set(),
        set(),
    )
    assert (plain.delete_after_upload, plain.pause, plain.shell_type, plain.release) == (
        False,
        False,
        None,
        "",
    )
    assert (
        npconfig.as_list(None) == []
        and npconfig.as_list("a") == ["a"]
        and npconfig.as_list(["a"]) == ["a"]
    )
    check("nodepool.config:get_provider_config", "provider")
    check(
        "nodepool.provider_manager:ProviderManager.reconfigure",
        "old_config, new_config, zk_conn, only_image_manager=False",
    )


@pytest.mark.spec("PY-5: value equality; constructing must not parse or connect")
@pytest.mark.parametrize(
    ("path", "arguments", "attribute"),
    [
        ("nodepool.config:Config", (), "images_dir"),
        ("nodepool.config:Label", (), "name"),
        ("nodepool.config:DiskImage", ("x",), "name"),
        ("nodepool.driver:DriverConfig", (), "name"),
        ("nodepool.driver.openstack.config:ProviderDiskImage", (), "name"),
        ("nodepool.driver.openstack.config:ProviderCloudImage", (), "name"),
        ("nodepool.driver.openstack.config:ProviderLabel", (), "name"),
        ("nodepool.driver.openstack.config:ProviderPool", (), "max_servers"),
        (
            "nodepool.driver.openstack.config:OpenStackProviderConfig",
            (None, {"name": "foo"}),
            "name",
        ),
        ("nodepool.driver.static.config:StaticPool", (), "max_servers"),
        ("nodepool.driver.static.config:StaticProviderConfig", ({"name": "foo"},), "name"),
    ],
)
def test_configuration_objects_are_equal_by_value(
    path: str, arguments: tuple[Any, ...], attribute: str
) -> None:
    cls = find(path)
    one, two = cls(*arguments), cls(*arguments)
    assert one == two
    assert (one != two) is False
    setattr(one, attribute, "changed" if attribute != "max_servers" else 3)
    assert one != two


@pytest.mark.spec("PY-5: pools of different classes differ; ConfigPool is abstract")
def test_pools_of_different_classes() -> None:
    from nodepool.driver import ConfigPool
    from nodepool.driver.openstack.config import ProviderPool
    from nodepool.driver.static.config import StaticPool

    assert ProviderPool() != StaticPool()
    with pytest.raises(TypeError):
        ConfigPool()  # type: ignore[abstract]


DRIVER_SIGNATURES = {
    "nodepool.driver:Drivers.get": "name",
    "nodepool.driver:ConfigPool.load": "pool_config",
    "nodepool.driver:ProviderConfig": "provider",
    "nodepool.driver:ProviderConfig.load": "newconfig",
    "nodepool.driver:ProviderConfig.getSupportedLabels": "pool_name=None",
    "nodepool.driver:Driver.getProviderConfig": "provider",
    "nodepool.driver:Driver.getProvider": "provider_config",
    "nodepool.driver:Provider.start": "zk_conn",
    "nodepool.driver:Provider.labelReady": "name",
    "nodepool.driver:Provider.startNodeCleanup": "node",
    "nodepool.driver:Provider.cleanupNode": "node_id",
    "nodepool.driver:Provider.waitForNodeCleanup": "node_id",
    "nodepool.driver:Provider.getRequestHandler": "poolworker, request",
    "nodepool.driver:Provider.uploadImage": "provider_image, image_name, filename, "
    "image_type=None, meta=None, "
    "md5=None, sha256=None",
    "nodepool.driver:Provider.deleteImage": "name, id",
    "nodepool.driver:ProviderNotifications.nodeDeletedNotification": "node",
    "nodepool.driver:NodeRequestHandlerNotifications.nodeReusedNotification": "node",
    "nodepool.driver:NodeRequestHandler": "pw, request",
    "nodepool.driver:NodeRequestHandler.launch": "node",
    "nodepool.driver:NodeRequestHandler.hasProviderQuota": "node_types",
    "nodepool.driver:NodeRequestHandler.hasRemainingQuota": "ntype",
    "nodepool.driver:NodeRequestHandler.checkReusableNode": "node",
    "nodepool.driver:NodeRequestHandler.setNodeMetadata": "node",
    "nodepool.driver:NodeRequestHandler.unlockNodeSet": "clear_allocation=False",
    "nodepool.driver:NodeRequestHandler.getDeclinedReasons": "",
    "nodepool.driver:NodeRequestHandler.declineRequest": "",
    "nodepool.driver:NodeRequestHandler.run": "",
    "nodepool.driver:NodeRequestHandler.poll": "",
    "nodepool.driver.utils:NodeLauncher": "handler, node, provider_config",
    "nodepool.driver.utils:NodeDeleter": "zk, provider_manager, node",
    "nodepool.driver.utils:NodeDeleter.delete": "zk_conn, manager, node, node_exists=True",
    "nodepool.driver.utils:QuotaInformation": "cores=None, instances=None, ram=None, default=0",
    "nodepool.driver.utils:QuotaInformation.add": "other",
    "nodepool.driver.utils:QuotaInformation.subtract": "other",
    "nodepool.driver.utils:QuotaInformation.from_resources": "resources",
    "nodepool.driver.utils:QuotaSupport.quotaNeededByLabel": "label, pool",
    "nodepool.driver.utils:QuotaSupport.estimatedNodepoolQuotaUsed": "pool=None",
    "nodepool.driver.utils:RateLimiter": "name, rate_limit",
    "nodepool.driver.utils:LazyExecutorTTLCache": "ttl, executor",
    "nodepool.driver.utils:ImageUploader": "adapter, log, path, image_name, metadata",
    "nodepool.driver.utils:ImageUploader.upload": "timeout=None",
    "nodepool.driver.utils:Segment": "index, offset, data",
    "nodepool.driver.statemachine:Adapter": "provider_config",
    "nodepool.driver.statemachine:Adapter.uploadImage": "provider_image, image_name, filename, "
    "image_format=None, "
    "metadata=None, md5=None, sha256=None",
    "nodepool.driver.statemachine:Adapter.deleteImage": "external_id",
    "nodepool.driver.statemachine:Adapter.getDeleteStateMachine": "external_id, log",
    "nodepool.driver.statemachine:Adapter.getConsoleLog": "label, external_id",
    "nodepool.driver.statemachine:Adapter.notifyNodescanFailure": "label, external_id",
    "nodepool.driver.statemachine:Resource": "metadata, type",
    "nodepool.driver.statemachine:StateMachineNodeLauncher": "handler, node, provider_config",
    "nodepool.driver.statemachine:StateMachineNodeDeleter": "zk_conn, provider_manager, node",
    "nodepool.driver.statemachine:NodescanRequest": "node, host_key_checking, timeout, log",
    "nodepool.driver.statemachine:NodescanRequest.advance": "socket_ready",
    "nodepool.nodeutils:nodescan": "ip, port=22, timeout=60, gather_hostkeys=True",
    "nodepool.nodeutils:set_node_ip": "node",
    "nodepool.nodeutils:Timer": "log, msg",
    "nodepool.stats:get_client": "",
    "nodepool.stats:StatsReporter": "statsd_client",
    "nodepool.stats:StatsReporter.recordLaunchStats": "subkey, dt",
    "nodepool.logconfig:get_annotated_logger": "logger, event_id=None, node_request_id=None, "
    "node_id=None",
    "nodepool.driver.static.config:StaticProviderConfig": "provider",
    "nodepool.driver.static.provider:StaticNodeProvider": "provider",
    "nodepool.driver.static.provider:nodeTuple": "node",
    "nodepool.driver.metastatic.config:MetastaticProviderConfig": "driver, provider",
    "nodepool.driver.metastatic.config:MetastaticPool": "provider_config, pool_config",
    "nodepool.driver.metastatic.config:MetastaticLabel": "label, provider_config, provider_pool",
    "nodepool.driver.metastatic.adapter:MetastaticAdapter": "provider_config",
    "nodepool.driver.metastatic.adapter:MetastaticInstance": "backing_node, slot, node, "
    "metadata=None",
    "nodepool.driver.metastatic.adapter:BackingNodeRecord": "label_name, slot_count",
    "nodepool.driver.fake.adapter:FakeAdapter": "provider_config",
    "nodepool.driver.fake.adapter:FakeOpenStackCloud": "images=None, networks=None",
    "nodepool.driver.example.config:ExampleProviderConfig": "driver, provider",
    "nodepool.driver.test.config:TestConfig": "provider",
    "nodepool.driver.test.provider:TestProvider": "provider",
}


@pytest.mark.spec("PY-6; DRV-1 to DRV-10: signatures of the plug-in API")
@pytest.mark.parametrize("path", DRIVER_SIGNATURES)
def test_plug_in_api_has_the_signatures_of_the_contract(path: str) -> None:
    check(path, DRIVER_SIGNATURES[path])


NAMES = """
    nodepool.driver:Drivers.load nodepool.driver:Drivers.drivers
    nodepool.driver:Drivers.drivers_paths nodepool.driver:Drivers.log
    nodepool.driver:ConfigValue.ignore_equality nodepool.driver:LabelRecorder.removeNode
    nodepool.driver:ConfigPool.getCommonSchemaDict
    nodepool.driver:ProviderConfig.getCommonSchemaDict nodepool.driver:Provider.PAUSE_AT_QUOTA
    nodepool.driver:Provider.cleanupLeakedResources nodepool.driver:Provider.errorLabels
    nodepool.driver:Provider.listNodes nodepool.driver:NodeRequestHandler.failed_nodes
    nodepool.driver:NodeRequestHandler.ready_nodes
    nodepool.driver.utils:QuotaInformation.non_negative
    nodepool.driver.utils:QuotaInformation.get_resources
    nodepool.driver.utils:QuotaSupport.getLabelQuota
    nodepool.driver.utils:QuotaSupport.estimatedNodepoolQuota
    nodepool.driver.utils:QuotaSupport.getProviderLimits
    nodepool.driver.utils:QuotaSupport.unmanagedQuotaUsed
    nodepool.driver.utils:QuotaSupport.invalidateQuotaCache nodepool.driver.utils:RateLimitInstance
    nodepool.driver.statemachine:StateMachineDriver
    nodepool.driver.statemachine:StateMachine.advance
    nodepool.driver.statemachine:Instance.getQuotaInformation
    nodepool.driver.statemachine:StateMachineHandler
    nodepool.driver.statemachine:NodescanWorker.MAX_REQUESTS
    nodepool.driver.statemachine:NodescanWorker.addRequest
    nodepool.driver.statemachine:NodescanWorker.removeRequest
    nodepool.driver.statemachine:NodescanWorker.registerDescriptor
    nodepool.driver.statemachine:NodescanWorker.unRegisterDescriptor
    nodepool.driver.statemachine:NodescanEvent nodepool.driver.statemachine:NodescanRequest.FAKE
    nodepool.driver.statemachine:NodescanRequest.result
    nodepool.driver.statemachine:NodescanRequest.fail
    nodepool.driver.statemachine:NodescanRequest.cleanup
    nodepool.driver.statemachine:Adapter.getCreateStateMachine
    nodepool.driver.statemachine:Adapter.listInstances
    nodepool.driver.statemachine:Adapter.listResources
    nodepool.driver.statemachine:Adapter.deleteResource
    nodepool.driver.statemachine:Adapter.getQuotaLimits
    nodepool.driver.statemachine:Adapter.getQuotaForLabel
    nodepool.driver.statemachine:Adapter.getAZs nodepool.driver.statemachine:Adapter.labelReady
    nodepool.driver.statemachine:Adapter.stop nodepool.stats:normalize_statsd_name
    nodepool.version:version_info.version_string nodepool.nodeutils:Attributes
    nodepool.driver.static:StaticDriver nodepool.driver.static.config:StaticPool
    nodepool.driver.static.handler:StaticNodeRequestHandler
    nodepool.driver.static.provider:StaticNodeError nodepool.driver.static.provider:NodeTuple
    nodepool.driver.metastatic:MetastaticDriver
    nodepool.driver.metastatic.config:MetastaticCloudImage
    nodepool.driver.metastatic.adapter:MetastaticCreateStateMachine
    nodepool.driver.metastatic.adapter:MetastaticDeleteStateMachine nodepool.driver.fake:FakeDriver
    nodepool.driver.fake.config:FakeProviderConfig nodepool.driver.fake.adapter:Dummy
    nodepool.driver.fake.adapter:FakeUploadFailCloud
    nodepool.driver.fake.adapter:FakeLaunchAndGetFaultCloud
    nodepool.driver.fake.adapter:FakeLaunchAndDeleteFailCloud
    nodepool.driver.fake.adapter:FakeDeleteImageFailCloud nodepool.driver.openstack:OpenStackDriver
    nodepool.driver.openstack.adapter:OpenStackAdapter nodepool.driver.example:ExampleDriver
    nodepool.driver.example.adapter:Adapter nodepool.driver.example.adapter:CreateStateMachine
    nodepool.driver.example.adapter:DeleteStateMachine nodepool.driver.example.adapter:Instance
    nodepool.driver.test:TestDriver nodepool.driver.test.config:TestPool
    nodepool.driver.test.handler:TestHandler nodepool.status:node_list nodepool.status:output
    nodepool.cmd.nodepoolcmd:main
"""


@pytest.mark.spec("DRV-1 to DRV-10: names of the plug-in API; FAK-1, FAK-2, FAK-3")
@pytest.mark.parametrize("path", NAMES.split())
def test_plug_in_api_has_the_names_of_the_contract(path: str) -> None:
    find(path)


@pytest.mark.spec("OST-1.7: methods that subclasses and test benches replace")
@pytest.mark.parametrize(
    "name",
    [
        "_getClient",
        "_getServer",
        "_listServers",
        "_listPorts",
        "_listImages",
        "_findImage",
        "_findNetwork",
        "_listFlavors",
        "_listAZs",
        "_listVolumes",
        "_listFloatingIps",
        "_createServer",
        "_deleteServer",
        "IMAGE_CHECK_TIMEOUT",
    ],
)
def test_openstack_adapter_has_the_names_of_the_contract(name: str) -> None:
    find(f"nodepool.driver.openstack.adapter:OpenStackAdapter.{name}")


@pytest.mark.spec("DRV-7.2: getCreateStateMachine is called with seven positional arguments")
def test_create_state_machine_arguments() -> None:
    from nodepool.driver.statemachine import Adapter

    names = list(parameters("nodepool.driver.statemachine:Adapter.getCreateStateMachine"))
    assert names == ["hostname", "label", "image_external_id", "metadata", "request", "az", "log"]
    adapter = Adapter(None)  # type: ignore[arg-type]
    assert adapter.getAZs() == [None]
    assert adapter.labelReady(None) is True
    assert adapter.getQuotaLimits().default == math.inf
    assert adapter.getQuotaForLabel(None).get_resources()["instances"] == 1
    adapter.notifyNodescanFailure(None, None)
    adapter.stop()


@pytest.mark.spec("DRV-9: exceptions, their bases and statsd keys")
@pytest.mark.parametrize(
    ("name", "base", "key"),
    [
        ("LaunchNodepoolException", "Exception", "error.nodepool"),
        ("LaunchStatusException", "Exception", "error.status"),
        ("LaunchNetworkException", "Exception", "error.network"),
        ("LaunchKeyscanException", "Exception", "error.keyscan"),
        ("CapacityException", "Exception", "error.capacity"),
        ("QuotaException", "Exception", None),
        ("RuntimeConfigurationException", "Exception", None),
        ("TimeoutException", "Exception", None),
        ("ConnectionTimeoutException", "TimeoutException", "error.ssh"),
        ("IPAddTimeoutException", "TimeoutException", "error.ipadd"),
        ("ServerCreateTimeoutException", "TimeoutException", "error.servercreatetimeout"),
        ("ServerDeleteTimeoutException", "TimeoutException", "error.serverdeletetimeout"),
        ("ImageCreateException", "TimeoutException", "error.imagetimeout"),
        ("BuilderError", "RuntimeError", None),
        ("BuilderInvalidCommandError", "BuilderError", None),
        ("DibFailedError", "BuilderError", None),
        ("ZKException", "Exception", None),
        ("ZKLockException", "ZKException", None),
        ("NotFound", "Exception", None),
    ],
)
def test_exceptions_have_the_bases_and_keys_of_the_contract(
    name: str, base: str, key: str | None
) -> None:
    from nodepool import exceptions

    found = getattr(exceptions, name)
    assert [cls.__name__ for cls in found.__mro__][1] == base
    assert getattr(found, "statsd_key", None) == key


@pytest.mark.spec("DRV-3.1: private bookkeeping; hashes of equal objects are equal and stay; repr")
def test_config_value_ignores_private_attributes_in_comparisons() -> None:
    from nodepool.driver import ConfigValue

    class Value(ConfigValue):
        ignore_equality = ["owner"]

    class Derived(Value):
        pass

    one, two = Value(), Value()
    one.owner = "x"  # type: ignore[attr-defined]
    assert one == two and hash(one) == hash(two)
    before = hash(one)
    one.size = 3  # type: ignore[attr-defined]
    assert one != two and hash(one) == before
    one.size = None  # type: ignore[attr-defined]
    assert one == two  # a missing key counts as None
    assert Value().__eq__(Derived()) is True and Derived().__eq__(Value()) is False
    assert one != 1 and one != None  # noqa: E711
    assert repr(one) == "<Value>"
    one.name = "n"  # type: ignore[attr-defined]
    assert repr(one) == "<Value n>"


@pytest.mark.spec("DRV-3.2: defaults of ConfigPool and of load")
def test_config_pool_has_the_defaults_of_the_contract() -> None:
    from nodepool.driver import ConfigPool

    class Pool(ConfigPool):
        def __init__(self) -> None:
            self.labels = ["set before"]
            super().__init__()

        def load(self, pool_config: dict[str, Any], full_config: Any, provider: Any) -> None:  # type: ignore[override]
            super().load(pool_config)

    pool = Pool()
    assert vars(pool) == {
        "labels": {},
        "max_servers": math.inf,
        "node_attributes": None,
        "priority": None,
        "ignore_provider_quota": False,
        "azs": None,
    }
    pool.load({}, None, None)
    assert (pool.max_servers, pool.node_attributes, pool.priority) == (math.inf, None, None)
    pool.load({"max-servers": 2, "node-attributes": {"a": 1}, "priority": 7}, None, None)
    assert (pool.max_servers, pool.node_attributes, pool.priority) == (2, {"a": 1}, 7)
    assert ConfigPool.getCommonSchemaDict() == {
        "max-servers": int,
        "node-attributes": dict,
        "priority": int,
    }


@pytest.mark.spec("DRV-5.7: LabelRecorder")
def test_label_recorder_keeps_labels_in_order() -> None:
    from nodepool.driver import LabelRecorder

    recorder = LabelRecorder()
    for label, node in (("a", "1"), ("b", "2"), ("a", "3")):
        recorder.add(label, node)
    assert recorder.data[0] == {"label": "a", "node_id": "1"}
    assert recorder.labels() == ["a", "b", "a"]
    assert recorder.pop("a") == "1"
    assert recorder.pop("zzz") is None
    recorder.removeNode("2")
    assert recorder.labels() == ["a"]


@pytest.mark.spec("DRV-7.3, DRV-7.4, DRV-7.5: what StateMachine, Instance and Resource start with")
def test_state_machine_objects() -> None:
    from nodepool.driver.statemachine import Instance, Resource, StateMachine

    machine = StateMachine()
    assert (machine.START, machine.state, machine.external_id, machine.complete) == (
        "start",
        "start",
        None,
        False,
    )
    assert isinstance(machine.start_time, float)
    assert vars(Instance()) == {
        "ready": False,
        "deleted": False,
        "external_id": None,
        "public_ipv4": None,
        "public_ipv6": None,
        "private_ipv4": None,
        "interface_ip": None,
        "cloud": None,
        "az": None,
        "region": None,
        "host_id": None,
        "metadata": {},
        "driver_data": None,
        "slot": None,
        "node_properties": {},
    }
    with pytest.raises(NotImplementedError):
        Instance().getQuotaInformation()

    class Bare(Instance):
        def __init__(self) -> None:
            self.external_id = "x"

    assert "x" in repr(Bare())
    resource = Resource({"a": "b"}, "volume")
    assert (resource.type, resource.plural_metric_name, resource.metadata) == (
        "volume",
        "volumes",
        {"a": "b"},
    )


@pytest.mark.spec(
    "DRV-10: cachetools is a declared dependency; 'import *' and old style imports of helpers"
)
def test_third_party_imports() -> None:
    import configparser

    text = (REPOSITORY / "setup.cfg").read_text()
    setup = configparser.ConfigParser()
    setup.read_string(text)
    assert "cachetools" in setup["options"]["install_requires"]
    namespace: dict[str, Any] = {}
    exec(
        "import cachetools\n"
        "from nodepool.driver.utils import *\n"
        "from nodepool.driver.utils import NodeLauncher, NodeDeleter, QuotaInformation, "
        "QuotaSupport, RateLimiter\n"
        "from nodepool.driver import statemachine, ConfigPool, ConfigValue, Driver, "
        "NodeRequestHandler, Provider\n"
        "from nodepool.driver.statemachine import *\n"
        "from nodepool.driver.statemachine import StateMachineDriver, StateMachineProvider, "
        "Adapter\n"
        "from nodepool import exceptions, nodeutils, stats, version\n"
        "from nodepool.nodeutils import iterate_timeout, nodescan, Timer\n"
        "from nodepool.logconfig import get_annotated_logger\n"
        "import nodepool.zk.zookeeper as zk\n"
        "from nodepool.zk import zookeeper\n",
        namespace,
    )
    assert namespace["MAX_QUOTA_AGE"] == 300


@pytest.mark.spec("DRV-8: getSafeAttributes for templates; priority of a request")
def test_request_gives_attributes_for_templates_and_its_priority() -> None:
    from nodepool.zk.zookeeper import NodeRequest

    request = NodeRequest("050-0000000123")
    request.node_types, request.relative_priority, request.tenant_name = ["l"], 4, "t"
    request.requestor_data = {"a": 1}
    assert request.priority == ("050", 4, "0000000123")
    safe = request.getSafeAttributes()
    template = "{request.id} {request.labels} {request.tenant_name} {request.requestor_data}"
    assert template.format(request=safe) == "050-0000000123 ['l'] t {'a': 1}"
    for name in ("requestor", "relative_priority", "event_id", "created_time"):
        assert hasattr(safe, name), name
