"""Driver for Kubernetes: namespaces and pods (KUB). ``kubernetes`` is imported on demand."""

from nodepool.driver.statemachine.driver import NamedClassesDriver


class KubernetesDriver(NamedClassesDriver):
    name = "kubernetes"
    config_class = "nodepool.driver.kubernetes.config:KubernetesProviderConfig"
    adapter_class = "nodepool.driver.kubernetes.adapter:KubernetesAdapter"
    provider_class = "nodepool.driver.kubernetes.provider:KubernetesProvider"
