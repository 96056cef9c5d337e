"""Static files of the pages: those of others are unchanged, and the first view needs no chain of requests."""

from __future__ import annotations

import hashlib
import re
from types import SimpleNamespace
from typing import Any

from nodepool.web.v1 import FILES, Api
from tests import REPOSITORY

STATIC = REPOSITORY / "nodepool/web/static"


def test_vendored_files_have_their_checksums_and_a_license() -> None:
    lines = (line.split() for line in (STATIC / "SHA256SUMS").read_text().splitlines())
    sums = {name: checksum for checksum, name in lines}
    assert sums == {name: hashlib.sha256((STATIC / name).read_bytes()).hexdigest() for name in sums}
    assert {"uplot.js", "uplot.css", "uplot.LICENSE"} == sums.keys()
    assert "MIT" in (STATIC / "uplot.LICENSE").read_text()
    assert "(v1.6.32)" in (STATIC / "uplot.js").read_text()


def test_only_scripts_styles_and_pictures_are_served() -> None:
    assert {name.rpartition(".")[2] for name in FILES} == {"css", "js", "svg"}


def test_page_names_all_modules_so_that_they_are_fetched_together() -> None:
    nodepool: Any = None
    request: Any = SimpleNamespace(path="/ui/nodes")
    page = Api(nodepool).answer(request, {}).body.decode()
    named = re.findall(r'<link rel="modulepreload" href="/ui/static/([^"]+)">', page)
    assert set(named) == {name for name in FILES if name.endswith(".js")} - {"app.js", "uplot.js"}
