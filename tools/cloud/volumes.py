"""Extend Cinder's in-memory fake driver, for tools/openstack: it also "copies" images."""

from __future__ import annotations

from typing import Any

from cinder.tests import fake_driver


class MemoryDriver(fake_driver.FakeLoggingVolumeDriver):  # type: ignore[misc]
    def clone_image(
        self, context: Any, volume: Any, image_location: Any, image_meta: Any, image_service: Any
    ) -> Any:
        return {}, True

    def copy_image_to_volume(
        self, context: Any, volume: Any, image_service: Any, image_id: Any, **options: Any
    ) -> None:
        pass
