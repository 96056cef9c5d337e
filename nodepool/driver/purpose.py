"""What a provider is being made for; adapters ask in their constructors."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager

_images_only: contextvars.ContextVar[bool] = contextvars.ContextVar("images_only", default=False)


def images_only() -> bool:
    """True while a provider is made for image uploads only, that is by a builder."""
    return _images_only.get()


@contextmanager
def making(for_images_only: bool) -> Iterator[None]:
    """Around the making of a provider, on the thread that makes it."""
    token = _images_only.set(for_images_only)
    try:
        yield
    finally:
        _images_only.reset(token)
