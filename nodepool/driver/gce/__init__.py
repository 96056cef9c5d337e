"""Driver for Google Compute Engine. Google's libraries are imported on demand."""

from nodepool.driver.statemachine.driver import NamedClassesDriver


class GceDriver(NamedClassesDriver):
    name = "gce"
    config_class = "nodepool.driver.gce.config:GceProviderConfig"
    adapter_class = "nodepool.driver.gce.adapter:GceAdapter"
