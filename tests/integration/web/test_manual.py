"""The manual in a real browser, as wide as a phone and as a laptop."""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests import REPOSITORY
from tests.support.browser import browser


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def manual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address at which the manual is served."""
    made = tmp_path_factory.mktemp("manual")
    subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-b", "html", REPOSITORY / "doc", made],
        timeout=120,
        check=True,
    )
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=made)
    )
    thread = threading.Thread(target=server.serve_forever, name="manual")
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def pages() -> list[str]:
    found = [page.relative_to(REPOSITORY / "doc") for page in (REPOSITORY / "doc").rglob("*.rst")]
    return sorted(
        f"/{page.with_suffix('.html')}"
        for page in found
        if "_build" not in page.parts and "fragments" not in page.parts
    )


@pytest.mark.full
@pytest.mark.spec("issue 32.7: the manual has no horizontal scrolling at 390 px")
@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_of_the_manual_scrolls_sideways(manual: str, width: int) -> None:
    with browser(manual, viewport={"width": width, "height": 800}) as seen:
        wide = {}
        for page in pages():
            seen.open(page)
            wide[page] = seen.page.evaluate("document.documentElement.scrollWidth")
    assert {page: found for page, found in wide.items() if found > width} == {}


@pytest.mark.full
def test_samples_of_the_manual_are_not_cut_on_narrow_screens(manual: str) -> None:
    cut = (
        "[...document.querySelectorAll('pre:not(.drawing)')].filter((each) => each.scrollWidth > "
        "each.clientWidth + 1).length"
    )
    with browser(manual, viewport={"width": 640, "height": 800}) as seen:
        found = {}
        for page in pages():
            seen.open(page)
            found[page] = seen.page.evaluate(cut)
    assert {page: count for page, count in found.items() if count} == {}


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_landing_page_and_reference_are_accessible(manual: str, scheme: str) -> None:
    with browser(manual, color_scheme=scheme) as seen:
        for page in (
            "/index.html",
            "/reference.html",
            "/operation/index.html",
            "/operation/waiting.html",
        ):
            seen.open(page)
            assert seen.accessible() == []
