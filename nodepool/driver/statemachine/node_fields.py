"""Fields of a node's record that come from its image and its machine (LAU-9.2, LAU-9.4)."""

from __future__ import annotations

import contextlib

from nodepool.config.model import ConfigPool, ImageAccess
from nodepool.driver.statemachine.model import Instance
from nodepool.zk import zookeeper as zk

IMAGE_FIELDS = ("username", "python_path", "shell_type", "connection_port", "connection_type")
#: Copied from the instance to the node if the instance has them.
IMAGE_OVERRIDES = (*IMAGE_FIELDS, "host_keys")
INSTANCE_FIELDS = (
    "external_id",
    "public_ipv4",
    "private_ipv4",
    "public_ipv6",
    "host_id",
    "cloud",
    "region",
    "az",
    "driver_data",
    "slot",
    "node_properties",
)


def copy_image(node: zk.Node, image: ImageAccess) -> None:
    """Copy how to log in from the configured image to the record."""
    for name in IMAGE_FIELDS:
        setattr(node, name, getattr(image, name))


def copy_instance(node: zk.Node, instance: Instance, pool: ConfigPool) -> None:
    """Copy what the cloud reports about the machine to the record."""
    for name in INSTANCE_FIELDS:
        setattr(node, name, getattr(instance, name, None))
    if node.node_properties is None:
        node.node_properties = {}
    node.interface_ip = getattr(instance, "interface_ip", None)
    if pool.use_internal_ip:
        private = getattr(instance, "private_ipv4", None) or getattr(instance, "private_ipv6", None)
        node.interface_ip = private or node.interface_ip
    for name in IMAGE_OVERRIDES:
        if hasattr(instance, name):
            setattr(node, name, getattr(instance, name))
    node.host_keys = node.host_keys or []
    if instance.node_attributes:
        node.attributes = {**instance.node_attributes, **(pool.node_attributes or {})}
    with contextlib.suppress(NotImplementedError):
        node.resources = dict(instance.getQuotaInformation().get_resources())
