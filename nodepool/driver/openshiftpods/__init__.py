"""Driver for pods in existing projects of OpenShift, with the launcher's own rights (OSH)."""

from nodepool.driver.statemachine.driver import NamedClassesDriver


class OpenshiftPodsDriver(NamedClassesDriver):
    name = "openshiftpods"
    config_class = "nodepool.driver.openshiftpods.config:OpenshiftPodsProviderConfig"
    adapter_class = "nodepool.driver.openshiftpods.adapter:OpenshiftPodsAdapter"
    provider_class = "nodepool.driver.openshiftpods.provider:OpenshiftPodsProvider"
