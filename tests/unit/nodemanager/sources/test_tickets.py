"""Tickets of both forms, and everything that must be refused."""

from __future__ import annotations

import base64
import copy
import hashlib
import hmac
import json
import pathlib
import shutil
import subprocess
import time
from typing import Any

import jwt
import pytest
from lxml import etree
from signxml.algorithms import CanonicalizationMethod, DigestAlgorithm, SignatureMethod
from signxml.signer import XMLSigner

from nodepool.nodemanager.sources import tickets
from nodepool.nodemanager.sources.tickets import TicketError
from tests.support.authority import Authority
from tests.support.nodemanager.node import delegate, sliver

NS = "{urn:envelope}"
DS = "{http://www.w3.org/2000/09/xmldsig#}"


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module", params=["ed25519", "P-256"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bytes, str]:
    folder = tmp_path_factory.mktemp("keys")
    kind = (
        ["ed25519"] if request.param == "ed25519" else ["EC", "-pkeyopt", "ec_paramgen_curve:P-256"]
    )
    openssl("genpkey", "-algorithm", *kind, "-out", str(folder / "key"))
    openssl("pkey", "-in", str(folder / "key"), "-pubout", "-out", str(folder / "pub"))
    return (folder / "key").read_bytes(), str(folder / "pub")


@pytest.fixture(scope="module")
def rsa(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, str]:
    folder = tmp_path_factory.mktemp("rsa")
    openssl(
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        str(folder / "key"),
        "-out",
        str(folder / "cert"),
        "-subj",
        "/CN=authority",
        "-days",
        "2",
    )
    return (folder / "key").read_bytes(), str(folder / "cert")


def claims(**values: Any) -> dict[str, Any]:
    now = int(time.time())
    return {
        "iss": "auth",
        "aud": "here",
        "jti": "1",
        "iat": now,
        "exp": now + 60,
        "slivers": [sliver("a")],
        **values,
    }


@pytest.mark.spec("NM-C.6: JWS compact, EdDSA or ES256")
def test_jws_tickets_with_eddsa_or_es256_are_accepted(pair: tuple[bytes, str]) -> None:
    key, public = pair
    signed = tickets.sign([sliver("a", rspec={"nm_cpu_share": 5})], key, "auth", "here")
    (record,) = tickets.verify(signed, {"keys": [public], "issuers": ["auth"]}, "here").slivers
    assert (record["name"], record["rspec"]) == ("a", {"nm_cpu_share": 5})


@pytest.mark.spec("NM-C.6: a ticket contains slivers only")
@pytest.mark.parametrize(
    ("records", "text"),
    [
        ([sliver("a"), delegate("d")], "slivers only"),
        ([], "no slivers"),
        ([sliver("a/b")], "is not a name"),
    ],
    ids=["delegate", "nothing", "name"],
)
def test_nothing_is_signed_that_would_be_refused(
    pair: tuple[bytes, str], rsa: tuple[bytes, str], records: list[dict[str, Any]], text: str
) -> None:
    with pytest.raises(TicketError, match=text):
        tickets.sign(records, pair[0], "auth", "here")
    with pytest.raises(TicketError, match=text):
        tickets.sign_xml(records, rsa[0], pathlib.Path(rsa[1]).read_bytes(), "auth", "here")


@pytest.mark.spec("NM-C.9.8: replayed, wrong host, expired, tampered -> refused")
def test_invalid_jws_tickets_are_refused(pair: tuple[bytes, str]) -> None:
    key, public = pair
    options = {"keys": [public], "issuers": ["auth"]}
    algorithm = "EdDSA" if b"P-256" not in key and len(key) < 150 else "ES256"

    def made(**values: Any) -> str:
        return jwt.encode(claims(**values), key, algorithm=algorithm)

    def refused(signed: str, text: str, host: str = "here", **changed: Any) -> None:
        with pytest.raises(TicketError, match=text):
            tickets.verify(signed, {**options, **changed}, host)

    good = made(jti="good")
    refused(good, "(?i)audience", host="elsewhere")
    head, body, signature = good.split(".")
    content = json.loads(base64.urlsafe_b64decode(body + "=="))
    content["slivers"][0]["name"] = "evil"
    forged = base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()
    refused(f"{head}.{forged}.{signature}", "(?i)signature")
    none = base64.urlsafe_b64encode(b'{"alg":"none"}').rstrip(b"=").decode()
    refused(f"{none}.{body}.", "(?i)alg")
    with open(public, "rb") as stream:
        secret = stream.read()
    hs = base64.urlsafe_b64encode(b'{"alg":"HS256"}').rstrip(b"=").decode()
    mac = (
        base64.urlsafe_b64encode(hmac.new(secret, f"{hs}.{body}".encode(), hashlib.sha256).digest())
        .rstrip(b"=")
        .decode()
    )
    refused(f"{hs}.{body}.{mac}", "(?i)alg")
    refused(made(exp=int(time.time()) - 100, iat=int(time.time()) - 200), "expired")
    refused(made(iat=int(time.time()) + 900, exp=int(time.time()) + 999), "not yet valid")
    refused(made(exp=int(time.time()) + 10**9), "more than a year")
    refused(made(iss="other"), "issuer")
    refused(made(slivers=[]), "no slivers")
    refused(made(slivers=[delegate("d")]), "slivers only")
    refused(made(slivers=[{"record_key": "bwcap", "account_type": "bwcap"}]), "slivers only")
    refused(made(slivers=[sliver("a/b")]), "is not a name")
    refused(made(jti="x" * 999), "usable id")
    for field in ("exp", "iat", "jti", "aud", "iss"):
        left = {k: v for k, v in claims().items() if k != field}
        refused(jwt.encode(left, key, algorithm=algorithm), field)
    refused(good, "no keys", keys=[])
    refused(good, "cannot read", keys=["/nowhere"])
    refused("x" * (tickets.MAX_SIZE + 1), "more than")
    refused("rubbish", ".")
    found = tickets.verify(good, options, "here")
    assert (found.id, found.expiry) == ("auth:good", content["exp"] + 30)


def test_keys_of_several_kinds(pair: tuple[bytes, str], tmp_path: pathlib.Path) -> None:
    """A ticket of one kind of key does not stumble over the others."""
    key, public = pair
    others = []
    for number, kind in enumerate(
        (["ed25519"], ["EC", "-pkeyopt", "ec_paramgen_curve:P-256"], ["RSA"])
    ):
        openssl("genpkey", "-algorithm", *kind, "-out", str(tmp_path / f"k{number}"))
        openssl(
            "pkey",
            "-in",
            str(tmp_path / f"k{number}"),
            "-pubout",
            "-out",
            str(tmp_path / f"p{number}"),
        )
        others.append(str(tmp_path / f"p{number}"))
    (tmp_path / "junk").write_text("junk")
    signed = tickets.sign([sliver("a")], key, "auth", "here")
    assert tickets.verify(signed, {"keys": [str(tmp_path / "junk"), *others, public]}, "here")
    with pytest.raises(TicketError):
        tickets.verify(signed, {"keys": [*others, str(tmp_path / "junk")]}, "here")


def test_unsuitable_keys_and_names_are_refused_when_signing(
    rsa: tuple[bytes, str], pair: tuple[bytes, str]
) -> None:
    with pytest.raises(TicketError, match="Ed25519 or P-256"):
        tickets.sign([sliver("a")], rsa[0], "auth", "here")
    with pytest.raises(TicketError, match="private key"):
        tickets.sign([sliver("a")], b"junk", "auth", "here")
    with pytest.raises(TicketError, match="is not a name"):
        tickets.sign([sliver("a/b")], pair[0], "auth", "here")
    with pytest.raises(TicketError, match="seconds"):
        tickets.sign([sliver("a")], pair[0], "auth", "here", lifetime=0)


# -- the form of the original


def xml(rsa: tuple[bytes, str]) -> str:
    with open(rsa[1], "rb") as stream:
        return tickets.sign_xml([sliver("a")], rsa[0], stream.read(), "auth", "here")


def signed_xml(rsa: tuple[bytes, str], content: dict[str, Any], **options: Any) -> str:
    root = etree.Element(f"{NS}Envelope", nsmap={None: "urn:envelope"})  # type: ignore[dict-item]
    etree.SubElement(root, f"{NS}Data").text = json.dumps(content)
    with open(rsa[1], encoding="ascii") as stream:
        signer = XMLSigner(c14n_algorithm=CanonicalizationMethod.CANONICAL_XML_1_0, **options)
        return etree.tostring(signer.sign(root, key=rsa[0], cert=stream.read()), encoding="unicode")


def check(rsa: tuple[bytes, str], text: str, **options: Any) -> list[dict[str, Any]]:
    return tickets.verify(text, {"xml-keys": [rsa[1]], **options}, "here").slivers


@pytest.mark.spec("NM-A.12, NM-C.6: enveloped signature, C14N 1.0, RSA-SHA256")
def test_xml_tickets_with_rsa_sha256_are_accepted(rsa: tuple[bytes, str]) -> None:
    text = xml(rsa)
    assert "rsa-sha256" in text
    assert "REC-xml-c14n-20010315" in text
    assert [record["name"] for record in check(rsa, text)] == ["a"]


C14N, C14N_11, EXCLUSIVE = (
    "http://www.w3.org/TR/2001/REC-xml-c14n-20010315",
    "http://www.w3.org/2006/12/xml-c14n11",
    "http://www.w3.org/2001/10/xml-exc-c14n#",
)
#: Canonicalization, prefix of the signature, attributes of the envelope, white space,
#: transformation of the content.
FORMS = {
    "as templates of xmlsec1 and SFA are": (C14N, "", "", "", ""),
    "with white space": (C14N, "", "", "\n  ", ""),
    "with comments": (C14N + "#WithComments", "", "", "", ""),
    "version 1.1": (C14N_11, "", "", "", ""),
    "exclusive": (EXCLUSIVE, "", "", "", ""),
    "a prefix": (C14N, "ds", "", "", ""),
    "a prefix, exclusive": (EXCLUSIVE, "ds", "", "", ""),
    "more namespaces": (C14N, "", ' xmlns:a="urn:a" xmlns:b="urn:b"', "\n", ""),
    "more namespaces and a prefix": (C14N, "ds", ' xmlns:a="urn:a"', "", C14N),
    "content transformed, too": (C14N, "", ' version="1"', "", EXCLUSIVE),
}


@pytest.mark.skipif(
    shutil.which("xmlsec1") is None, reason="xmlsec1 is not installed: the other implementation"
)
@pytest.mark.spec("NM-C.6: enveloped signature of any implementation; xmlsec1 is the judge")
@pytest.mark.parametrize("form", FORMS)
def test_tickets_that_xmlsec1_signs_are_accepted(
    rsa: tuple[bytes, str], tmp_path: pathlib.Path, form: str
) -> None:
    method, prefix, more, space, transform = FORMS[form]
    colon = prefix and f"{prefix}:"
    further = f'<{colon}Transform Algorithm="{transform}"/>' if transform else ""
    template = f"""<Envelope xmlns="urn:envelope"{more}><Data>{json.dumps(claims())}</Data>{space}
<{colon}Signature xmlns{prefix and ":" + prefix}="http://www.w3.org/2000/09/xmldsig#">{space}
<{colon}SignedInfo>{space}
<{colon}CanonicalizationMethod Algorithm="{method}"/>{space}
<{colon}SignatureMethod Algorithm="http://www.w3.org/2001/04/xmldsig-more#rsa-sha256"/>
<{colon}Reference URI=""><{colon}Transforms>{space}
<{colon}Transform Algorithm="http://www.w3.org/2000/09/xmldsig#enveloped-signature"/>{further}
</{colon}Transforms>
<{colon}DigestMethod Algorithm="http://www.w3.org/2001/04/xmlenc#sha256"/>
<{colon}DigestValue/></{colon}Reference>
</{colon}SignedInfo>{space}<{colon}SignatureValue/></{colon}Signature></Envelope>"""
    (tmp_path / "template").write_text(template)
    (tmp_path / "key").write_bytes(rsa[0])
    signed = tmp_path / "signed"

    def xmlsec1(*arguments: object) -> int:
        return subprocess.run(
            ["xmlsec1", *map(str, arguments)], check=False, capture_output=True, timeout=60
        ).returncode

    assert (
        xmlsec1(
            "--sign", "--privkey-pem", tmp_path / "key", "--output", signed, tmp_path / "template"
        )
        == 0
    )
    assert xmlsec1("--verify", "--pubkey-cert-pem", rsa[1], signed) == 0
    assert [record["name"] for record in check(rsa, signed.read_text())] == ["a"]
    signed.write_text(signed.read_text().replace('"jti": "1"', '"jti": "2"'))
    assert xmlsec1("--verify", "--pubkey-cert-pem", rsa[1], signed) != 0
    with pytest.raises(TicketError, match="signature"):
        check(rsa, signed.read_text())


@pytest.mark.spec("NM-C.6: ECDSA-SHA256 too")
def test_xml_tickets_may_use_elliptic_keys(tmp_path: pathlib.Path) -> None:
    authority = Authority(tmp_path)
    key = pathlib.Path(authority.key).read_bytes()
    text = tickets.sign_xml(
        [sliver("a")], key, pathlib.Path(authority.cert).read_bytes(), "auth", "here"
    )
    assert check((key, authority.cert), text)


@pytest.mark.spec("NM-C.9.8: tampered, expired, wrong host -> refused")
def test_invalid_xml_tickets_are_refused(rsa: tuple[bytes, str], tmp_path: pathlib.Path) -> None:
    now = int(time.time())
    cases: list[tuple[str, str]] = [
        (
            xml(rsa)
            .replace("&quot;a&quot;", "&quot;b&quot;")
            .replace('"name": "a"', '"name": "b"'),
            "signature",
        ),
        (signed_xml(rsa, claims(aud="elsewhere")), "another host"),
        (signed_xml(rsa, claims(exp=now - 100)), "expired"),
        (signed_xml(rsa, claims(iat=now + 500, exp=now + 600)), "not valid yet"),
        (signed_xml(rsa, claims(exp=None)), "UNIX times"),
        (signed_xml(rsa, claims(jti=None)), "usable id"),
        (signed_xml(rsa, claims(slivers=[delegate("d")])), "slivers only"),
        ("<Envelope xmlns='urn:envelope'><Data>{}</Data></Envelope>", "signature"),
        ("<a><b>", "not acceptable"),
        ("<!DOCTYPE a [<!ENTITY x 'y'>]>" + xml(rsa), "not acceptable"),
    ]
    for text, problem in cases:
        with pytest.raises(TicketError, match=problem):
            check(rsa, text)
    with pytest.raises(TicketError, match="issuer"):
        check(rsa, xml(rsa), issuers=["other"])
    other = Authority(tmp_path, "other")
    with pytest.raises(TicketError, match="signature"):
        tickets.verify(xml(rsa), {"xml-keys": [other.cert]}, "here")
    with pytest.raises(TicketError, match="no certificates"):
        tickets.verify(xml(rsa), {}, "here")


@pytest.mark.spec("NM-C.6: SHA-1 only behind an option")
def test_sha1_is_accepted_only_with_the_option(rsa: tuple[bytes, str]) -> None:
    class Old(XMLSigner):
        def check_deprecated_methods(self) -> None:
            """As the original signed."""

    root = etree.Element(f"{NS}Envelope", nsmap={None: "urn:envelope"})  # type: ignore[dict-item]
    etree.SubElement(root, f"{NS}Data").text = json.dumps(claims())
    signer = Old(
        signature_algorithm=SignatureMethod.RSA_SHA1,
        digest_algorithm=DigestAlgorithm.SHA1,
        c14n_algorithm=CanonicalizationMethod.CANONICAL_XML_1_0,
    )
    with open(rsa[1], encoding="ascii") as stream:
        text = etree.tostring(signer.sign(root, key=rsa[0], cert=stream.read()), encoding="unicode")
    with pytest.raises(TicketError, match="signature"):
        check(rsa, text)
    assert check(rsa, text, **{"allow-sha1": True})


@pytest.mark.spec("NM-C.6: a key of the signature's own choice, HMAC for example, proves nothing")
def test_key_of_the_signatures_own_choice_proves_nothing(rsa: tuple[bytes, str]) -> None:
    root = etree.Element(f"{NS}Envelope", nsmap={None: "urn:envelope"})  # type: ignore[dict-item]
    etree.SubElement(root, f"{NS}Data").text = json.dumps(claims())
    with open(rsa[1], "rb") as stream:
        signed = XMLSigner(signature_algorithm=SignatureMethod.HMAC_SHA256).sign(
            root, key=stream.read()
        )
    for options in ({}, {"allow-sha1": True}):
        with pytest.raises(TicketError, match="signature"):
            check(rsa, etree.tostring(signed, encoding="unicode"), **options)


def wrappings(good: str) -> dict[str, etree._Element]:
    """Documents with a true signature, and other data around, before, after or within what it
    covers.
    """
    original = etree.fromstring(good)
    evil = json.dumps(claims(jti="evil", slivers=[sliver("evil")]))
    found: dict[str, etree._Element] = {}

    def element(tag: str, *children: Any, text: str | None = None) -> etree._Element:
        made = etree.Element(f"{NS}{tag}", nsmap={None: "urn:envelope"})  # type: ignore[dict-item]
        made.text = text
        made.extend(children)
        return made

    found["a second Data"] = copy.deepcopy(original)
    found["a second Data"].insert(0, element("Data", text=evil))
    found["around"] = element("Envelope", element("Data", text=evil), copy.deepcopy(original))
    moved = copy.deepcopy(original)
    signature = moved.find(f"{DS}Signature")
    assert signature is not None
    found["signature moved"] = element(
        "Envelope", element("Data", text=evil), copy.deepcopy(signature)
    )
    found["original in the signature"] = element(
        "Envelope", element("Data", text=evil), copy.deepcopy(signature)
    )
    holder = etree.SubElement(found["original in the signature"][1], f"{DS}Object")
    holder.append(copy.deepcopy(original))
    found["data in the signature"] = copy.deepcopy(original)
    inner = found["data in the signature"].find(f"{DS}Signature")
    assert inner is not None
    etree.SubElement(inner, f"{DS}Object").append(element("Data", text=evil))
    found["two signatures"] = copy.deepcopy(original)
    found["two signatures"].append(copy.deepcopy(signature))
    found["comment in the data"] = copy.deepcopy(original)
    data = found["comment in the data"].find(f"{NS}Data")
    assert data is not None and data.text is not None
    data.text, rest = data.text[:10], data.text[10:]
    data.append(etree.Comment("x"))
    data[0].tail = rest
    return found


@pytest.mark.spec("NM-C.6, NM-C.9.8: only the verified subtree counts (signature wrapping)")
def test_only_the_signed_subtree_of_a_ticket_counts(rsa: tuple[bytes, str]) -> None:
    good = xml(rsa)
    for case, document in wrappings(good).items():
        try:
            records = check(rsa, etree.tostring(document, encoding="unicode"))
        except TicketError:
            continue
        assert [record["name"] for record in records] == ["a"], case


@pytest.mark.spec("NM-C.6: a signature of a part, by id, does not cover the rest")
def test_wrapping_by_id(rsa: tuple[bytes, str]) -> None:
    root = etree.Element(f"{NS}Envelope", nsmap={None: "urn:envelope"})  # type: ignore[dict-item]
    data = etree.SubElement(root, f"{NS}Data", Id="x")
    data.text = json.dumps(claims())
    with open(rsa[1], encoding="ascii") as stream:
        signed = XMLSigner().sign(root, key=rsa[0], cert=stream.read(), reference_uri="#x")
    signed.insert(0, etree.Element(f"{NS}Data"))
    signed[0].text = json.dumps(claims(slivers=[sliver("evil")]))
    with pytest.raises(TicketError):
        check(rsa, etree.tostring(signed, encoding="unicode"))
