"""The purpose of a provider, which adapters query in their constructors."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager

_images_only: contextvars.ContextVar[bool] = contextvars.ContextVar("images_only", default=False)


def images_only() -> bool:
    """Return whether the provider is created for image uploads only, by a builder."""
    return _images_only.get()


@contextmanager
def making(for_images_only: bool) -> Iterator[None]:
    """Set the purpose while a provider is created on this thread."""
    token = _images_only.set(for_images_only)
    try:
        yield
    finally:
        _images_only.reset(token)
