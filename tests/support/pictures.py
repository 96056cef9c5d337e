"""Comparison of screenshots with their references.

``NODEPOOL_REFERENCES=renew`` replaces references that differ. Text depends on the browser and the
fonts: the tests bring a font, and references count only for the version of the browser that made
them.
"""

from __future__ import annotations

import io
import os
import pathlib

import pytest
from PIL import Image, ImageChops

from tests import REPOSITORY

FOLDER = REPOSITORY / "tests/integration/web/reference"
VERSION = FOLDER / "browser"
RENEW = (
    "NODEPOOL_REFERENCES=renew tools/zookeeper run -- python -m pytest "
    "tests/integration/web/test_screenshots.py"
)
TOLERANCE = 16
"""Difference of a color (of 255) that does not count: edges of letters."""
SHARE = 0.0002
"""Largest share of pixels that may differ by more."""


def renews() -> bool:
    return os.environ.get("NODEPOOL_REFERENCES") == "renew"


def require_version(version: str) -> None:
    """Skip the test if another version of the browser made the references."""
    known = VERSION.read_text().strip() if VERSION.exists() else "none"
    if renews():
        VERSION.write_text(f"{version}\n")
    elif version != known:
        pytest.skip(
            f"the references are from Chromium {known}, this is Chromium {version}; renew them "
            f"with: {RENEW}"
        )


def difference(actual: Image.Image, expected: Image.Image) -> tuple[float, Image.Image]:
    """Return the share of pixels that differ, and a picture in which these are white."""
    size = (max(actual.width, expected.width), max(actual.height, expected.height))
    # What only one of them has differs from any color of a page.
    one, other = Image.new("RGB", size, (255, 0, 255)), Image.new("RGB", size, (0, 255, 0))
    one.paste(actual)
    other.paste(expected)
    bands = ImageChops.difference(one, other).split()
    largest = ImageChops.lighter(ImageChops.lighter(bands[0], bands[1]), bands[2])
    mask = largest.point([255 * (value > TOLERANCE) for value in range(256)])
    return mask.histogram()[255] / (size[0] * size[1]), mask


def compare(png: bytes, name: str, folder: pathlib.Path) -> str | None:
    """Return what differs, or None.

    :param folder: for the screenshot and the difference.
    """
    actual = Image.open(io.BytesIO(png)).convert("RGB")
    reference = FOLDER / f"{name}.webp"
    if reference.exists():
        share, mask = difference(actual, Image.open(reference).convert("RGB"))
        if share <= SHARE:
            return None
    elif not renews():
        return f"there is no {reference}; create it with: {RENEW}"
    if renews():
        actual.save(reference, lossless=True, method=6)
        return None
    actual.save(folder / f"{name}.png")
    mask.save(folder / f"{name}-difference.png")
    return (
        f"{name}: {share:.2%} of the pixels differ from {reference}; see {folder}/{name}.png and "
        f"{name}-difference.png. "
        f"If the change is wanted: {RENEW}"
    )
