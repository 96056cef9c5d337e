"""Tickets: slivers granted by a signature instead of a list (nodemanager.md A.12, B.3, C.6)."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ALGORITHMS = ("EdDSA", "ES256")
MAX_SIZE = 1 << 20
MAX_LIFETIME = 366 * 86400
_LEEWAY = 30


class TicketError(Exception):
    """The ticket is refused; the text says why."""


UseOnce = Callable[[str, float], bool]


def sign(records: Sequence[Mapping[str, Any]], key: bytes, issuer: str, host: str, lifetime: int = 3600) -> str:
    """A compact JWS for one host.

    :param key: private key, PEM, Ed25519 or P-256.
    :param lifetime: seconds.
    """
    import jwt
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    private = load_pem_private_key(key, None)
    now = int(time.time())
    algorithm = "EdDSA" if isinstance(private, Ed25519PrivateKey) else "ES256"
    return jwt.encode({"iss": issuer, "aud": host, "jti": uuid.uuid4().hex, "iat": now, "exp": now + lifetime,
                       "slivers": list(records)}, private, algorithm=algorithm)  # type: ignore[arg-type]


def verify(
    signed: str, options: Mapping[str, Any], host: str, use_once: UseOnce, now: float | None = None,
) -> list[dict[str, Any]]:
    """The records of a ticket whose signature, time, host and first use have been checked.

    :param options: ``keys`` (PEM files of public keys), ``issuers``, ``xml-keys`` (PEM files of certificates).
    :param use_once: remembers the id until its expiry; False when it was used.
    :raises TicketError: it is refused.
    """
    if len(signed) > MAX_SIZE:
        raise TicketError(f"more than {MAX_SIZE} bytes")
    text = signed.strip()
    if text.startswith("<"):
        return _verify_xml(text.encode(), options, host, use_once, time.time() if now is None else now)
    return _verify_jws(text, options, host, use_once)


def _read(paths: Sequence[str]) -> list[bytes]:
    found = []
    for path in paths:
        try:
            with open(path, "rb") as stream:
                found.append(stream.read())
        except OSError as error:
            raise TicketError(f"this node cannot read its key {path}: {error.strerror}") from error
    return found


def _verify_jws(text: str, options: Mapping[str, Any], host: str, use_once: UseOnce) -> list[dict[str, Any]]:
    import jwt

    keys = _read(options.get("keys") or ())
    if not keys:
        raise TicketError("this node has no keys for tickets (tickets.keys)")
    problem: Exception | None = None
    for key in keys:
        try:
            claims = jwt.decode(text, key, algorithms=list(ALGORITHMS), audience=host, leeway=_LEEWAY,
                                options={"require": ["exp", "iat", "jti", "aud", "iss"]})
        except jwt.InvalidTokenError as error:
            # The most telling one: a signature that fits with a time that does not.
            if problem is None or not isinstance(error, jwt.InvalidSignatureError):
                problem = error
            continue
        except (ValueError, TypeError) as error:
            problem = error
            continue
        return _claims(claims, options, use_once)
    raise TicketError(str(problem) or "no key fits")


def _claims(claims: Mapping[str, Any], options: Mapping[str, Any], use_once: UseOnce) -> list[dict[str, Any]]:
    issuers = options.get("issuers")
    if issuers and claims["iss"] not in issuers:
        raise TicketError(f"issuer {str(claims['iss'])[:60]!r} is not accepted here")
    if claims["exp"] - claims["iat"] > MAX_LIFETIME:
        raise TicketError("it is valid for more than a year")
    return _records(claims.get("slivers"), str(claims["jti"]), float(claims["exp"]), use_once)


def _records(slivers: Any, jti: str, expiry: float, use_once: UseOnce) -> list[dict[str, Any]]:
    if not isinstance(slivers, list) or not slivers or not all(isinstance(item, dict) for item in slivers):
        raise TicketError("it contains no slivers")
    if not use_once(jti, expiry + _LEEWAY):
        raise TicketError("it was used before")
    return [dict(item) for item in slivers]


def _verify_xml(document: bytes, options: Mapping[str, Any], host: str, use_once: UseOnce, now: float) -> list[dict[str, Any]]:
    """The enveloped signature of the original; only what the signature covers is looked at."""
    from defusedxml import ElementTree
    from defusedxml.common import DefusedXmlException
    from signxml.exceptions import InvalidInput, SignXMLException
    from signxml.verifier import SignatureConfiguration, XMLVerifier

    certificates = _read(options.get("xml-keys") or ())
    if not certificates:
        raise TicketError("this node has no certificates for XML tickets (tickets.xml-keys)")
    try:
        ElementTree.fromstring(document, forbid_dtd=True)
    except (DefusedXmlException, ElementTree.ParseError) as error:
        raise TicketError(f"not acceptable XML: {error!r}") from None
    settings: dict[str, Any] = {}
    if options.get("allow-sha1"):
        from signxml import DigestAlgorithm, SignatureMethod

        settings = {"signature_methods": frozenset(SignatureMethod), "digest_algorithms": frozenset(DigestAlgorithm)}
    problem: Exception | None = None
    for certificate in certificates:
        try:
            verified = XMLVerifier().verify(document, x509_cert=certificate.decode("ascii"),
                                            expect_config=SignatureConfiguration(expect_references=1, **settings))
        except (SignXMLException, InvalidInput, ValueError, TypeError) as error:
            problem = error
            continue
        signed = verified[0] if isinstance(verified, list) else verified
        return _envelope(signed.signed_xml, host, use_once, now)
    raise TicketError(f"signature: {problem}")


def _envelope(element: Any, host: str, use_once: UseOnce, now: float) -> list[dict[str, Any]]:
    """The signed element itself holds the data: JSON with the claims of the other form."""
    if element is None:
        raise TicketError("nothing is signed")
    data = [e for e in element.iter() if isinstance(e.tag, str) and e.tag.rpartition("}")[2] == "Data"]
    if len(data) != 1:
        raise TicketError("exactly one Data element must be signed")
    try:
        claims = json.loads("".join(data[0].itertext()))
    except ValueError:
        raise TicketError("Data is not JSON") from None
    if not isinstance(claims, dict) or claims.get("aud") != host:
        raise TicketError("it is for another host")
    expiry = claims.get("exp")
    if isinstance(expiry, bool) or not isinstance(expiry, (int, float)) or expiry < now:
        raise TicketError("it has expired")
    if not isinstance(claims.get("jti"), str):
        raise TicketError("it has no jti")
    return _records(claims.get("slivers"), claims["jti"], float(expiry), use_once)


__all__ = ["TicketError", "sign", "verify"]
