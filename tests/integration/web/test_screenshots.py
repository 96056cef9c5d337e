"""Screenshots of the pages over a fixed cluster, compared with references
(tests/support/pictures.py).
"""

from __future__ import annotations

import datetime
import pathlib
from typing import Any

import pytest
from PIL import Image

from tests import REPOSITORY
from tests.support import fixed_cluster, pictures
from tests.support.browser import Browser, browser
from tests.support.fixed_cluster import IMAGE, IN_USE_NODE, NOW, WAITING_REQUEST

FONTS = REPOSITORY / "tests/support/fonts"
#: Same letters on every machine.
STYLE = (
    "".join(
        f"@font-face {{ font-family: Test; font-weight: {weights}; src: "
        f'url("/ui/static/inter-latin-{weight}-normal.woff2"); }}\n'
        for weight, weights in ((400, "100 500"), (700, "600 900"))
    )
    + "*, *::before, *::after { font-family: Test !important; caret-color: transparent !important; "
    "}\n"
)
#: Charts are drawn with the font of the page, too.
CANVAS = """
const font = Object.getOwnPropertyDescriptor(CanvasRenderingContext2D.prototype, 'font');
Object.defineProperty(CanvasRenderingContext2D.prototype, 'font', {
  get: font.get, set(value) { font.set.call(this, value.replace(/(\\d+px).*/, '$1 Test')); },
});
"""
#: Letters drawn in the same way on every machine.
DRAWING = {"FONTCONFIG_FILE": str(FONTS / "fonts.conf")}
ARGUMENTS = (
    "--font-render-hinting=none",
    "--disable-lcd-text",
    "--force-color-profile=srgb",
    "--disable-gpu",
)
PAGES = {
    "overview": "",
    "requests": "requests",
    "request": f"request/{WAITING_REQUEST}",
    "nodes": "nodes",
    "node": f"node/{IN_USE_NODE}",
    "providers": "providers",
    "images": "images",
    "image": f"image/{IMAGE}",
    "events": "events",
    "config": "config",
    "leases": "leases",
}
NARROW = ("overview", "request", "nodes")


def prepare(seen: Browser) -> None:
    """Fix the font and the clock."""
    page = seen.page
    page.clock.set_fixed_time(datetime.datetime.fromtimestamp(NOW, datetime.UTC))
    page.add_init_script(CANVAS)

    def styled(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, body=STYLE + answer.text())

    page.route("**/app.css", styled)
    page.route(
        "**/*.woff2",
        lambda route: route.fulfill(
            path=FONTS / route.request.url.rpartition("/")[2], content_type="font/woff2"
        ),
    )


def taken(seen: Browser, path: str) -> bytes:
    """Return the picture of a page that is complete."""
    page = seen.page
    seen.open(f"/ui/{path}")
    page.get_by_text("live", exact=True).wait_for()
    page.evaluate(
        "Promise.all(['400 16px Test', '700 16px Test'].map((each) => document.fonts.load(each)))"
    )
    if not path:
        # Drawn with the font; the first time it may not have been loaded.
        page.locator(".uplot canvas").nth(3).wait_for()
        page.evaluate(
            "document.querySelectorAll('.uplot').forEach((each) => { each.id = 'old'; }); "
            "dispatchEvent(new Event('resize'))"
        )
        page.locator(".uplot:not(#old) canvas").nth(3).wait_for()
    if path == "events":
        page.get_by_role("list", name="Events").locator("li").nth(
            len(fixed_cluster.events()) - 1
        ).wait_for(state="attached")
    return bytes(page.screenshot(full_page=True, animations="disabled", caret="hide"))


@pytest.mark.spec("issue: compared screenshots, 390 and 1280 px, light and dark")
@pytest.mark.parametrize(
    "scheme, width, names", [("light", 1280, tuple(PAGES)), ("dark", 390, NARROW)]
)
def test_pages_are_rendered_as_before(
    fixed_address: str, tmp_path: pathlib.Path, scheme: str, width: int, names: tuple[str, ...]
) -> None:
    options = {
        "color_scheme": scheme,
        "viewport": {"width": width, "height": 800},
        "reduced_motion": "reduce",
        "bypass_csp": True,
    }
    with browser(
        fixed_address, ARGUMENTS, DRAWING, timezone_id="UTC", locale="en-US", **options
    ) as seen:
        pictures.require_version(seen.page.context.browser.version)
        prepare(seen)
        found = [
            pictures.compare(taken(seen, PAGES[name]), f"{name}-{width}-{scheme}", tmp_path)
            for name in names
        ]
        assert [each for each in found if each] == []


@pytest.mark.parametrize(
    "change, expected", [((0, 0, 0), 0.0), ((40, 0, 0), 0.01), ((0, 0, 10), 0.0)]
)
def test_comparison_counts_pixels_that_differ_visibly(
    change: tuple[int, int, int], expected: float
) -> None:
    before = Image.new("RGB", (100, 100), (100, 100, 100))
    after = before.copy()
    after.paste(tuple(100 + each for each in change), (0, 0, 10, 10))
    assert pictures.difference(after, before)[0] == expected


def test_comparison_counts_pixels_that_only_one_picture_has() -> None:
    assert pictures.difference(Image.new("RGB", (10, 12)), Image.new("RGB", (10, 10)))[
        0
    ] == pytest.approx(2 / 12)


def test_references_together_are_small() -> None:
    assert sum(path.stat().st_size for path in pictures.FOLDER.iterdir()) <= 1_500_000
