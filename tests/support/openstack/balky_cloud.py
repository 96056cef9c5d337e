"""The test's side of the driver ``balky`` (tests/fixtures/drivers/balky)."""

from __future__ import annotations

import contextlib
import json
import pathlib
from typing import Any

from tests import REPOSITORY
from tests.support.builder import BuilderBench

DRIVERS = str(REPOSITORY / "tests" / "fixtures" / "drivers")


class BalkyCloud:
    """One cloud, with its provider entry for the configuration."""

    def __init__(self, tmp: pathlib.Path, name: str = "balky") -> None:
        self.name = name
        self.control = tmp / f"cloud-{name}"
        self.control.mkdir()

    def provider(
        self,
        images: list[Any] | tuple[Any, ...] = ("fake-image",),
        cloud: str = "fake",
        **options: Any,
    ) -> dict[str, Any]:
        return {
            **BuilderBench.provider(self.name, images, cloud),
            "driver": "balky",
            "control": str(self.control),
            **options,
        }

    def do(self, command: str, content: object = "") -> None:
        """``upload-fails`` and the like; see the driver."""
        (self.control / command).write_text(str(content))

    def stop_doing(self, command: str) -> None:
        (self.control / command).unlink(missing_ok=True)

    def images(self) -> list[dict[str, Any]]:
        found = []
        for path in sorted((self.control / "images").glob("*")):
            with contextlib.suppress(FileNotFoundError, ValueError):  # deleted or being written
                found.append(json.loads(path.read_text()))
        return found

    def calls(self, what: str) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            lines = [json.loads(line) for line in (self.control / "calls").read_text().splitlines()]
            return [line for line in lines if line["call"] == what]
        return []
