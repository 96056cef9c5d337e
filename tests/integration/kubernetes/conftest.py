"""A real API server, controllers and scheduler."""

from __future__ import annotations

from tests.support.kubernetes.scene import cluster, kubernetes_server, scene  # noqa: F401
