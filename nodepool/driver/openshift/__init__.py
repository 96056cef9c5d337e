"""Driver for OpenShift: projects, and pods in their own projects, as nodes (OSH)."""

from nodepool.driver.statemachine.driver import NamedClassesDriver


class OpenshiftDriver(NamedClassesDriver):
    name = "openshift"
    config_class = "nodepool.driver.openshift.config:OpenshiftProviderConfig"
    adapter_class = "nodepool.driver.openshift.adapter:OpenshiftAdapter"
    provider_class = "nodepool.driver.kubernetes.provider:KubernetesProvider"
