"""A bag of attributes."""

from __future__ import annotations


class Attributes:
    """A bag of attributes, for templates such as ``"{request.id}"``."""

    def __init__(self, **kw: object) -> None:
        self.__dict__.update(kw)

    def __repr__(self) -> str:
        return f"<Attributes {self.__dict__}>"
