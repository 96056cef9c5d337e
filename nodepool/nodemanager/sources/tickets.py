"""Tickets: slivers that are granted by a signature (NM-A.12, NM-B.3, NM-C.6)."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nodepool.base import optional
from nodepool.nodemanager.client import safe_xml
from nodepool.nodemanager.records.records import SLIVER, RecordError, parse_record

ALGORITHMS = ("EdDSA", "ES256")
#: Of XML signatures; SHA-1, as the original used it, only behind an option.
XML_METHODS = (
    "RSA_SHA256",
    "RSA_SHA384",
    "RSA_SHA512",
    "ECDSA_SHA256",
    "ECDSA_SHA384",
    "ECDSA_SHA512",
)
XML_DIGESTS = ("SHA256", "SHA384", "SHA512")
NAMESPACE = "urn:envelope"
#: Maximum characters of a ticket.
MAX_SIZE = 1 << 20
MAX_ID = 256
#: Maximum seconds of a ticket's validity.
MAX_LIFETIME = 366 * 86400
#: Maximum difference of clocks in seconds.
_LEEWAY = 30


class TicketError(Exception):
    """The ticket is refused or cannot be created; the text contains the reason."""


class Ticket(NamedTuple):
    """The content of a verified ticket."""

    #: Records.
    slivers: list[dict[str, Any]]
    #: To be accepted once only.
    id: str
    #: When the id may be forgotten (Unix seconds).
    expiry: float


def missing(options: Mapping[str, Any]) -> str | None:
    """Return what this machine lacks for tickets with these options; None: nothing."""
    wanted = {"keys": ("jwt", "cryptography"), "xml-keys": ("signxml", "lxml", "cryptography")}
    absent = optional.missing(
        {name for option, names in wanted.items() if options.get(option) for name in names}
    )
    return None if absent is None else f"tickets need {absent}"


def _check_records(slivers: object) -> list[dict[str, Any]]:
    """Check the records, both for signing and for verifying.

    :raises TicketError: there are none, or one is not a sliver.
    """
    if (
        not isinstance(slivers, list)
        or not slivers
        or not all(isinstance(item, Mapping) for item in slivers)
    ):
        raise TicketError("it contains no slivers")
    records = []
    for item in slivers:
        record = {"account_type": SLIVER, **item}
        if record["account_type"] != SLIVER:
            raise TicketError("it may contain slivers only")
        try:
            records.append(parse_record(record))
        except RecordError as error:
            raise TicketError(str(error)) from None
    return records


def _new_claims(
    records: Sequence[Mapping[str, Any]], issuer: str, host: str, lifetime: int
) -> dict[str, Any]:
    now = int(time.time())
    _check_records(list(records))
    if not 0 < lifetime <= MAX_LIFETIME:
        raise TicketError(f"a ticket is valid for 1 to {MAX_LIFETIME} seconds")
    return {
        "iss": issuer,
        "aud": host,
        "jti": uuid.uuid4().hex,
        "iat": now,
        "exp": now + lifetime,
        "slivers": list(records),
    }


def _private_key(key: bytes) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        return load_pem_private_key(key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise TicketError(
            f"the private key cannot be used (must be PEM without password): {error}"
        ) from error


def sign(
    records: Sequence[Mapping[str, Any]], key: bytes, issuer: str, host: str, lifetime: int = 3600
) -> str:
    """Return a compact JWS for one host.

    :param key: private key, PEM, Ed25519 or P-256.
    :param lifetime: seconds.
    :raises TicketError: key, records or lifetime cannot be used.
    """
    import jwt
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = _private_key(key)
    if isinstance(private, Ed25519PrivateKey):
        algorithm = "EdDSA"
    elif isinstance(private, EllipticCurvePrivateKey) and isinstance(private.curve, SECP256R1):
        algorithm = "ES256"
    else:
        raise TicketError(
            "the private key must be Ed25519 or P-256 (create one: openssl genpkey -algorithm "
            "ed25519)"
        )
    return jwt.encode(_new_claims(records, issuer, host, lifetime), private, algorithm=algorithm)


def sign_xml(
    records: Sequence[Mapping[str, Any]],
    key: bytes,
    certificate: bytes,
    issuer: str,
    host: str,
    lifetime: int = 3600,
) -> str:
    """Return the original form: an enveloped signature (C14N 1.0; SHA-256, not SHA-1).

    :param key: private key, PEM, RSA or elliptic curve.
    :param certificate: its certificate, PEM.
    :raises TicketError: see :func:`sign`.
    """
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from lxml import etree
    from signxml.algorithms import CanonicalizationMethod, SignatureMethod
    from signxml.exceptions import SignXMLException
    from signxml.signer import XMLSigner

    private = _private_key(key)
    claims = _new_claims(records, issuer, host, lifetime)
    root = etree.Element(f"{{{NAMESPACE}}}Envelope", nsmap={None: NAMESPACE})  # type: ignore[dict-item]
    etree.SubElement(root, f"{{{NAMESPACE}}}Data").text = json.dumps(claims)
    method = (
        SignatureMethod.RSA_SHA256
        if isinstance(private, RSAPrivateKey)
        else SignatureMethod.ECDSA_SHA256
    )
    signer = XMLSigner(
        signature_algorithm=method, c14n_algorithm=CanonicalizationMethod.CANONICAL_XML_1_0
    )
    try:
        signed = signer.sign(root, key=private, cert=certificate.decode("ascii"))
    except (SignXMLException, ValueError, TypeError) as error:
        raise TicketError(f"cannot be signed with this key and certificate: {error}") from error
    return etree.tostring(signed, encoding="unicode")


def verify(signed: str, options: Mapping[str, Any], host: str, now: float | None = None) -> Ticket:
    """Verify a ticket of either form. The caller makes sure that it is used once.

    :param options: ``keys`` (PEM files of public keys), ``issuers``, ``xml-keys`` (PEM files of
        certificates).
    :raises TicketError: it is refused.
    """
    if len(signed) > MAX_SIZE:
        raise TicketError(f"more than {MAX_SIZE} bytes")
    text = signed.strip()
    if text.startswith("<"):
        return _verify_xml(text.encode(), options, host, time.time() if now is None else now)
    return _verify_jws(text, options, host)


def _read(paths: Sequence[str]) -> list[bytes]:
    found = []
    for path in paths:
        try:
            found.append(Path(path).read_bytes())
        except OSError as error:
            raise TicketError(f"this node cannot read its key {path}: {error.strerror}") from error
    return found


def _verify_jws(text: str, options: Mapping[str, Any], host: str) -> Ticket:
    import jwt
    from cryptography.exceptions import UnsupportedAlgorithm

    keys = _read(options.get("keys") or ())
    if not keys:
        raise TicketError("this node has no keys for tickets (tickets.keys)")
    problem: Exception | None = None
    for key in keys:
        try:
            claims = jwt.decode(
                text,
                key,
                algorithms=list(ALGORITHMS),
                audience=host,
                leeway=_LEEWAY,
                options={"require": ["exp", "iat", "jti", "aud", "iss"]},
            )
        except jwt.PyJWTError as error:  # also for a key of another type than the ticket's
            # Keep the most useful error: a valid signature with an invalid time.
            if problem is None or (
                isinstance(error, jwt.InvalidTokenError)
                and not isinstance(error, jwt.InvalidSignatureError)
            ):
                problem = error
            continue
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            problem = problem or error
            continue
        return _claims(claims, options)
    raise TicketError(str(problem) or "no key matches")


def _claims(claims: Mapping[str, Any], options: Mapping[str, Any]) -> Ticket:
    """Check the claims of both forms after signature, host and time."""
    issuer, jti, issued, expiry = (claims.get(name) for name in ("iss", "jti", "iat", "exp"))
    if not isinstance(issuer, str) or not isinstance(jti, str) or not 0 < len(jti) <= MAX_ID:
        raise TicketError("it has no issuer (iss), or no usable id (jti)")
    issued, expiry = _time(issued), _time(expiry)
    issuers = options.get("issuers")
    if issuers and issuer not in issuers:
        raise TicketError(f"issuer {issuer[:60]!r} is not accepted here")
    if expiry - issued > MAX_LIFETIME:
        raise TicketError("it is valid for more than a year")
    return Ticket(
        _check_records(claims.get("slivers")), f"{issuer[:256]}:{jti}", float(expiry) + _LEEWAY
    )


def _time(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12:
        raise TicketError("iat and exp must be UNIX times")
    return float(value)


def _verifier() -> Any:
    """Return a verifier whose canonical form is that of xmlsec1, with or without prefixes.

    lxml (6.1.3) adds an empty default namespace to elements deep in a part of a tree that declares
    one.
    """
    from lxml import etree
    from signxml.verifier import XMLVerifier

    class Verifier(XMLVerifier):
        def _c14n(self, nodes: Any, *arguments: Any, **options: Any) -> Any:
            # Parsed on its own; lxml writes the namespaces of its parents to it.
            alone = etree.fromstring(etree.tostring(nodes, with_tail=False))
            return super()._c14n(alone, *arguments, **options)

    return Verifier()


def _verify_xml(document: bytes, options: Mapping[str, Any], host: str, now: float) -> Ticket:
    """Verify the enveloped signature of the original; only signed content is used."""
    from cryptography.exceptions import InvalidSignature
    from lxml.etree import LxmlError
    from signxml.algorithms import DigestAlgorithm, SignatureMethod
    from signxml.exceptions import SignXMLException
    from signxml.verifier import SignatureConfiguration

    certificates = _read(options.get("xml-keys") or ())
    if not certificates:
        raise TicketError("this node has no certificates for XML tickets (tickets.xml-keys)")
    try:
        safe_xml.check(document)
    except safe_xml.UnsafeXml as error:
        raise TicketError(f"not acceptable XML: {error}") from None
    sha1 = bool(options.get("allow-sha1"))
    settings = SignatureConfiguration(
        expect_references=1,
        location="./",
        signature_methods=frozenset(
            SignatureMethod[name] for name in (*XML_METHODS, *(("RSA_SHA1",) if sha1 else ()))
        ),
        digest_algorithms=frozenset(
            DigestAlgorithm[name] for name in (*XML_DIGESTS, *(("SHA1",) if sha1 else ()))
        ),
    )
    problem: Exception | None = None
    for certificate in certificates:
        try:
            verified = _verifier().verify(
                document, x509_cert=certificate.decode("ascii"), expect_config=settings
            )
        except (
            SignXMLException,
            InvalidSignature,
            LxmlError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
        ) as error:
            problem = error
            continue
        signed = verified[0] if isinstance(verified, list) else verified
        return _claims(_envelope(signed.signed_xml, host, now), options)
    raise TicketError(f"signature: {problem}")


def _envelope(element: Any, host: str, now: float) -> dict[str, Any]:
    """Return the claims: JSON in the Data of the signed element, and of no other."""
    if element is None:
        raise TicketError("nothing is signed")
    data = [
        e for e in element.iter() if isinstance(e.tag, str) and e.tag.rpartition("}")[2] == "Data"
    ]
    if (
        element.tag != f"{{{NAMESPACE}}}Envelope"
        or len(data) != 1
        or data[0].tag != f"{{{NAMESPACE}}}Data"
        or data[0].getparent() is not element
        or len(data[0])
    ):
        raise TicketError("an Envelope with exactly one Data of text must be signed")
    try:
        claims = json.loads(data[0].text or "")
    except (ValueError, RecursionError):
        raise TicketError("Data is not JSON") from None
    if not isinstance(claims, dict):
        raise TicketError("Data is not a JSON object")
    audience = claims.get("aud")
    if host not in (audience if isinstance(audience, list) else [audience]):
        raise TicketError("it is for another host")
    if _time(claims.get("exp")) < now - _LEEWAY:
        raise TicketError("it has expired")
    if _time(claims.get("iat")) > now + _LEEWAY:
        raise TicketError("it is not valid yet")
    return claims


__all__ = ["Ticket", "TicketError", "sign", "sign_xml", "verify"]
