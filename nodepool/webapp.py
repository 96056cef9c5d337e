"""The web server, under the name that test benches import (PY-1)."""

from nodepool.web.server import WebApp

__all__ = ["WebApp"]
