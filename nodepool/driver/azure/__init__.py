"""Driver for Microsoft Azure, by its REST API."""

from nodepool.driver.statemachine.driver import NamedClassesDriver


class AzureDriver(NamedClassesDriver):
    name = "azure"
    config_class = "nodepool.driver.azure.config:AzureProviderConfig"
    adapter_class = "nodepool.driver.azure.adapter:AzureAdapter"
