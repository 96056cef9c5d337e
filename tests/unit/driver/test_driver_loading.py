"""Finding and loading drivers: DRV-1."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest

from nodepool import driver
from nodepool.driver import Drivers
from nodepool.exceptions import ConfigurationError

BUILTIN = os.path.dirname(driver.__file__)

DRIVER = """
from nodepool.driver import Driver
class {name}(Driver):
    name = "{name}"
    def getProviderConfig(self, provider):
        return provider
    def getProvider(self, provider_config):
        return provider_config
"""


@pytest.fixture(autouse=True)
def builtins_again():
    yield
    Drivers.load([])


@pytest.fixture
def directory(tmp_path):
    def add(name, text, **files):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text(text)
        for module, content in files.items():
            (tmp_path / name / f"{module}.py").write_text(content)
        return str(tmp_path)

    return add


def reload(paths):
    Drivers.drivers = type(Drivers.drivers)()
    Drivers.load(paths)


@pytest.mark.spec("DRV-1: unknown name -> RuntimeError('<name>: unknown driver')")
def test_unknown_driver_is_an_error_with_its_name():
    with pytest.raises(RuntimeError, match=r"^nope: unknown driver"):
        Drivers.get("nope")
    with pytest.raises(ConfigurationError):
        Drivers.get("nope")


@pytest.mark.spec("DRV-1.1: called again with an equal list: nothing; a different list rebuilds")
def test_loading_an_equal_list_again_changes_nothing(directory):
    Drivers.load([])
    one = Drivers.get("test")
    Drivers.load([])
    assert Drivers.get("test") is one
    path = directory("extra", DRIVER.format(name="extra"))
    Drivers.load([path])
    assert Drivers.drivers_paths == [path]
    assert Drivers.get("extra").name == "extra"
    assert Drivers.get("test") is not one


@pytest.mark.spec("DRV-1: loads with no extra path if the registry is empty")
def test_empty_registry_is_loaded_when_used(monkeypatch):
    monkeypatch.setattr(Drivers, "drivers", {})
    monkeypatch.setattr(Drivers, "drivers_paths", None)
    assert type(Drivers.get("fake")).__name__ == "FakeDriver"


@pytest.mark.spec(
    "DRV-14.1: a path list that repeats the built-in directory works; built-ins stay usable"
)
def test_builtin_directory_repeated(caplog):
    reload([BUILTIN])
    assert type(Drivers.get("test")).__name__ == "TestDriver"
    assert type(Drivers.get("openstack")).__name__ == "OpenStackDriver"


@pytest.mark.spec(
    "DRV-1.2: an external directory may replace a built-in driver; the duplicate is warned about"
)
def test_external_driver_replaces_a_built_in_one(directory, caplog):
    reload([directory("test", DRIVER.format(name="Mine"))])
    assert type(Drivers.get("test")).__name__ == "Mine"
    assert "test" in caplog.text


def test_first_directory_wins(directory, tmp_path, caplog):
    one = directory("a/mine", DRIVER.format(name="First"))
    directory("b/mine", DRIVER.format(name="Second"))
    reload([f"{one}/a", f"{one}/b"])
    assert type(Drivers.get("mine")).__name__ == "First"
    assert "mine" in caplog.text


@pytest.mark.spec(
    "DRV-1.4: the module has the bare name and shadows no library; relative imports work"
)
def test_driver_module_shadows_no_library(directory):
    text = "from . import helper\nfrom .helper import VALUE\n" + DRIVER.format(name="json")
    reload([directory("json", text, helper="VALUE = 7\n")])
    found = Drivers.get("json")
    assert type(found).__module__ == "json"
    import json

    assert json.dumps(1) == "1"


@pytest.mark.spec(
    "DRV-1.5: none or more than one class -> error logged, directory skipped, loading goes on"
)
def test_directory_without_exactly_one_driver_is_skipped(directory, caplog):
    path = directory("none", "from nodepool.driver.test import TestDriver\n")
    directory("two", DRIVER.format(name="One") + DRIVER.format(name="Two"))
    directory("good", DRIVER.format(name="Good"))
    reload([path])
    assert type(Drivers.get("good")).__name__ == "Good"
    for name in ("none", "two"):
        assert f"{path}/{name}" in caplog.text
        with pytest.raises(RuntimeError):
            Drivers.get(name)


@pytest.mark.spec("DRV-1.7: a failure concerns that driver only and is raised clearly by get")
def test_failure_is_isolated(directory):
    path = directory("broken", "import libcloudy_missing\n")
    dies = "    def __init__(self):\n        1 / 0\n    name ="
    directory("dies", DRIVER.format(name="Dies").replace("    name =", dies))
    reload([path])
    with pytest.raises(
        ConfigurationError, match=r"libcloudy_missing.*install the missing Python module"
    ):
        Drivers.get("broken")
    with pytest.raises(ConfigurationError, match="ZeroDivisionError"):
        Drivers.get("dies")
    assert type(Drivers.get("test")).__name__ == "TestDriver"
    assert "broken" not in Drivers.drivers
    assert "test" in Drivers.drivers


def test_missing_directory_is_logged_and_skipped(caplog):
    reload(["/does/not/exist"])
    assert "/does/not/exist" in caplog.text
    assert Drivers.get("test")


@pytest.mark.spec(
    "DRV-1.7: a built-in is imported on first use; the registry still looks like a mapping"
)
def test_builtin_driver_is_imported_at_first_use():
    code = (
        "import sys; from nodepool.driver import Drivers; Drivers.load([]); "
        "print(len(Drivers.loaded()));"
        "print('test' in Drivers.known(), 'nodepool.driver.test' in sys.modules); "
        "Drivers.get('test');"
        "print('openstack' in sys.modules, 'nodepool.driver.fake' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.split() == ["0", "True", "False", "False", "False"]


def test_registry_maps_names_to_one_driver_each():
    reload([])
    assert {"fake", "openstack", "test", "example"} <= set(Drivers.drivers)
    for name, instance in Drivers.drivers.items():
        instance.reset()
        assert Drivers.get(name) is instance


@pytest.mark.spec("DRV-1.8: an entry-point group is consulted as an extra")
def test_drivers_of_entry_points_are_found(monkeypatch, tmp_path, caplog):
    (tmp_path / "some_driver_package.py").write_text(DRIVER.format(name="Pointed"))
    monkeypatch.syspath_prepend(str(tmp_path))
    points = [
        importlib.metadata.EntryPoint(
            "by-class", "some_driver_package:Pointed", "nodepool.drivers"
        ),
        importlib.metadata.EntryPoint("by-module", "some_driver_package", "nodepool.drivers"),
        importlib.metadata.EntryPoint("bad", "some_driver_package:DRIVER", "nodepool.drivers"),
        importlib.metadata.EntryPoint("test", "some_driver_package:Pointed", "nodepool.drivers"),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    reload([])
    assert type(Drivers.get("by-class")).__name__ == "Pointed"
    assert type(Drivers.get("by-module")).__name__ == "Pointed"
    assert type(Drivers.get("test")).__name__ == "TestDriver"
    with pytest.raises(ConfigurationError, match="bad: driver cannot be loaded"):
        Drivers.get("bad")


def test_driver_is_abstract():
    with pytest.raises(TypeError):
        driver.Driver()  # type: ignore[abstract]


@pytest.mark.spec("DRV-4: a provider that omits methods still works")
def test_provider_without_optional_methods_works():
    class Lazy(driver.Provider):
        pass

    provider = Lazy()
    provider.start(None)
    provider.idle()
    provider.stop()
    provider.join()
    provider.cleanupLeakedResources()
    provider.nodeDeletedNotification(None)  # type: ignore[arg-type]
    assert provider.errorLabels() == []
    assert provider.PAUSE_AT_QUOTA is True


def test_schema_of_providers_has_the_common_options():
    class Config(driver.ProviderConfig):
        pools = {}
        manage_images = False

        def load(self, newconfig):
            pass

        def getSchema(self):
            pass

        def getSupportedLabels(self, pool_name=None):
            return set()

    config = Config({"name": "x", "max-concurrency": 3})
    assert (config.name, config.driver.name, config.max_concurrency, config.priority) == (
        "x",
        "openstack",
        3,
        None,
    )
    assert repr(config) == "<Config x>"
    assert repr(driver.DriverConfig()) == "<DriverConfig>"
    with pytest.raises(KeyError):
        Config({})


@pytest.mark.spec("FAK-2: the test driver: ready at once, external id test-<request id>")
def test_driver_names_nodes_by_their_request():
    import types

    from nodepool.driver.test.config import TestConfig
    from nodepool.driver.test.handler import TestHandler

    config = TestConfig({"name": "t", "driver": "test"})
    assert config == TestConfig({"name": "t", "driver": "test", "pools": []})
    assert config != TestConfig({"name": "u", "driver": "test"})
    assert config.manage_images is False
    provider = Drivers.get("test").getProvider(config)
    assert provider.provider is config
    stored = []
    zk = types.SimpleNamespace(storeNode=stored.append)
    provider.start(zk)
    pw = types.SimpleNamespace(
        launcher_id="l",
        getProviderConfig=lambda: config,
        getPoolConfig=lambda: None,
        getZK=lambda: zk,
        getProviderManager=lambda: provider,
    )
    request = types.SimpleNamespace(id="100-1", event_id=None, node_types=["a"])
    handler = provider.getRequestHandler(pw, request)
    assert isinstance(handler, TestHandler)
    handler.zk = zk
    node = types.SimpleNamespace(state="building", external_id=None)
    handler.launch(node)
    assert (node.state, node.external_id) == ("ready", "test-100-1")
    assert stored == [node]
    assert handler.launchesComplete()
    assert handler.imagesAvailable()
    assert handler.alive_thread_count == 1
