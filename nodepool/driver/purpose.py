"""The purpose of a provider, which adapters query in their constructors."""

from __future__ import annotations

import contextvars

images_only: contextvars.ContextVar[bool] = contextvars.ContextVar("images_only", default=False)
"""Whether the provider is created for image uploads only, by a builder."""
