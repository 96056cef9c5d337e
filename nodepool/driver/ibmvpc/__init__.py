"""Driver for IBM Cloud VPC. IBM's libraries are imported when the first provider is used."""

from nodepool.driver.statemachine.driver import NamedClassesDriver


class IBMVPCDriver(NamedClassesDriver):
    name = "ibmvpc"
    config_class = "nodepool.driver.ibmvpc.config:IBMVPCProviderConfig"
    adapter_class = "nodepool.driver.ibmvpc.adapter:IBMVPCAdapter"
