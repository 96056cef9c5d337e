"""Documents of strangers, and what an installation without extras does."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys

import pytest

from nodepool.exceptions import ConfigurationError
from nodepool.nodemanager.client import safe_xml
from nodepool.nodemanager.config import parse
from nodepool.nodemanager.sources import slices_xml, tickets

BOMB = b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]><x>&b;</x>'
OUTSIDE = b'<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><x>&a;</x>'
PARAMETER = b'<!DOCTYPE x [<!ENTITY % a SYSTEM "http://127.0.0.1:1/"> %a;]><x/>'
TYPE = b'<!DOCTYPE slices SYSTEM "http://127.0.0.1:1/x.dtd"><slices/>'


@pytest.mark.spec("issue 10, F12: entities are refused without a package for it")
@pytest.mark.parametrize("document", [BOMB, OUTSIDE, PARAMETER, b"<x>", b"", b"\xff\xfe"])
def test_entities_are_refused(document: bytes) -> None:
    for types in (False, True):
        with pytest.raises(safe_xml.UnsafeXml):
            safe_xml.check(document, types)
    with pytest.raises(slices_xml.SlicesXmlError):
        slices_xml.parse(document, 1)


def test_document_type_is_accepted_in_slices_only() -> None:
    """A list of slices may have one; nothing is fetched for it."""
    assert slices_xml.parse(TYPE, 1) == []
    with pytest.raises(safe_xml.UnsafeXml, match="document type"):
        safe_xml.check(TYPE)


@pytest.mark.spec("issue 10, F12: a missing extra refuses the start with a clear text")
def test_missing_extra_is_reported_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("jwt", "signxml") else real(name)
    )
    assert tickets.missing({}) is None
    text = tickets.missing({"keys": ["k"], "xml-keys": ["x"]})
    assert text == (
        f"tickets need jwt, signxml, not installed here: {sys.executable} -m pip install "
        "'PyJWT[crypto]>=2.10.1' 'signxml<6,>=5.0.1'"
    )
    from nodepool.nodemanager.manager import NodeManager

    options = {
        "state-dir": str(tmp_path),
        "run-dir": str(tmp_path),
        "tickets": {"keys": ["k"]},
        "backend": "rootless",
    }
    with pytest.raises(ConfigurationError, match=r"-m pip install 'PyJWT\[crypto\]>=2\.10\.1'$"):
        NodeManager(parse(options, "test"))


@pytest.mark.spec("issue 10, F12: without the extra every call of the API is answered")
def test_calls_without_extras() -> None:
    code = """
import sys
for name in ("defusedxml", "jwt", "signxml", "lxml", "cryptography"):
    sys.modules[name] = None
from nodepool.nodemanager.client import xml_rpc
from nodepool.nodemanager.sources import slices_xml
assert xml_rpc.parse_call(xml_rpc.call("Help", [1])) == ("Help", (1,))
assert slices_xml.parse(b"<slices/>", 1) == []
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
