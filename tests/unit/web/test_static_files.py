"""Static files of the pages: those of others are unchanged, and the first view needs no chain of
requests.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import time
from typing import Any

import pytest

from nodepool.web import v1
from nodepool.web.http import Request, Response
from nodepool.web.v1 import FILES, Api
from nodepool.web.v1 import STATIC as STATIC_PATH
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
    page = answer("/ui/nodes").body.decode()
    named = re.findall(r'<link rel="modulepreload" href="/ui/static/([^"]+)">', page)
    assert set(named) == {name for name in FILES if name.endswith(".js")} - {"app.js", "uplot.js"}


def answer(path: str, accepted: str | None = None, tag: str | None = None) -> Response:
    nodepool: Any = None
    headers = {"accept-encoding": accepted, "if-none-match": tag}
    given = {key: value for key, value in headers.items() if value is not None}
    return Api(nodepool).answer(Request(path=path, headers=given))


@pytest.mark.parametrize("path", ["/ui/nodes", *(f"{STATIC_PATH}{name}" for name in sorted(FILES))])
def test_pages_scripts_and_styles_are_compressed_for_clients_that_accept_it(path: str) -> None:
    plain, packed = answer(path), answer(path, "deflate, gzip;q=0.8")
    if len(plain.body) <= 1000:
        assert packed == plain
        return
    assert gzip.decompress(packed.body) == plain.body and len(packed.body) < 0.8 * len(plain.body)
    assert packed.content_type == plain.content_type
    heads = [dict(each.headers) for each in (plain, packed)]
    assert [head.get("Content-Encoding") for head in heads] == [None, "gzip"]
    assert [head["Vary"] for head in heads] == ["Accept-Encoding"] * 2
    assert heads[0]["ETag"] != heads[1]["ETag"]
    assert [answer(path, "gzip", head["ETag"]).status for head in heads] == [200, 304]


@pytest.mark.parametrize(
    ("condition", "status"),
    [("{}", 304), ("W/{}", 304), ('"other", W/{} ', 304), ("*", 304), ('"other"', 200), ("", 200)],
)
def test_unchanged_answer_is_not_sent_again_whatever_form_its_tag_has(
    condition: str, status: int
) -> None:
    path = f"{STATIC_PATH}app.js"
    tag = dict(answer(path).headers)["ETag"]
    assert answer(path, tag=condition.format(tag)).status == status


@pytest.mark.parametrize(
    "accepted", ["", "gzip;q=0", "gzip; q=0.000, br", "identity", "xgzip", "br"]
)
def test_clients_that_do_not_accept_it_get_nothing_compressed(accepted: str) -> None:
    assert answer(f"{STATIC_PATH}app.js", accepted) == answer(f"{STATIC_PATH}app.js")


def test_all_scripts_and_styles_are_at_most_150_kb() -> None:
    assert sum(len(answer(f"{STATIC_PATH}{name}", "gzip").body) for name in FILES) <= 150_000


def test_equal_answers_have_equal_tags_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for now in (1e9, 2e9):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        found.append(v1.compressed(Response(b"x" * 2000), 1))
    assert found[0] == found[1]
