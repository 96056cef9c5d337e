"""Headless Chromium for the tests of the pages; a test fails when a page logs an error or breaks
its security policy.
"""

from __future__ import annotations

import os
import shutil
import urllib.parse
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

SECONDS = 30.0
SERIOUS = ("serious", "critical")


def executable() -> str | None:
    """The system's; None: the one that Playwright has installed (tools/run-tests)."""
    return shutil.which("chromium") or shutil.which("google-chrome")


class Browser:
    """One page of it."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.address = address
        self.errors: list[str] = []
        self.foreign: list[str] = []
        page.set_default_timeout(SECONDS * 1000)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on(
            "console",
            lambda message: self.errors.append(message.text) if message.type == "error" else None,
        )
        page.on(
            "dialog",
            lambda dialog: (self.errors.append(f"dialog {dialog.message}"), dialog.dismiss()),
        )
        page.on("request", self._asked)

    def _asked(self, request: Any) -> None:
        """Nothing may be fetched from elsewhere."""
        if urllib.parse.urlsplit(request.url).netloc != urllib.parse.urlsplit(self.address).netloc:
            self.foreign.append(request.url)

    def open(self, path: str) -> None:
        self.page.goto(f"{self.address}{path}")
        self.page.locator("h1").wait_for()

    def sees(self, text: str) -> None:
        """Wait until it is there."""
        self.page.get_by_text(text).first.wait_for()

    def accessible(self, impacts: Collection[str] = SERIOUS) -> list[str]:
        """What axe finds serious.

        :param impacts: those that count; none: all.
        """
        found = Axe().run(self.page).response["violations"]
        shown = [each for each in found if not impacts or each["impact"] in impacts]
        return [f"{each['id']}: {each['help']}: {each['nodes'][0]['html'][:200]}" for each in shown]


@contextmanager
def browser(
    address: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> Iterator[Browser]:
    """:param arguments: of Chromium.

    :param environment: further variables for it.
    :param options: of Playwright's new_page, such as color_scheme and viewport.
    """
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=executable(),
            args=["--no-sandbox", *arguments],
            env={**os.environ, **(environment or {})},
        )
        try:
            found = Browser(chromium.new_page(**options), address)
            yield found
            assert (found.errors, found.foreign) == ([], [])
        finally:
            chromium.close()
