"""Clouds that several tests use."""

from tests.support.aws.cloud import aws  # noqa: F401
from tests.support.kubernetes.scene import cluster, kubernetes_server  # noqa: F401
