"""Job tokens of CI systems: signed by an issuer, checked with its published keys."""

from __future__ import annotations

import fnmatch
import http
import json
import logging
import math
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jwt

from nodepool.access.identity import Denied, Identity, Role
from nodepool.answers import UNCOMPRESSED, DirectSession, content_of
from nodepool.base import threads
from nodepool.config.access import Issuer, Rule, protected

ALGORITHMS = ["RS256", "ES256"]
#: Seconds: difference of clocks, age of the keys, pause between two reads because of an unknown
#: key, one read.
SKEW, KEPT, PAUSE, TIMEOUT = 60, 3600.0, 60.0, 10.0
MOST_BYTES = 1 << 20
LONGEST_OWNER = 255

log = logging.getLogger("nodepool.access")


class Keys:
    """The published keys of one issuer."""

    def __init__(self, issuer: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._issuer = issuer
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._keys: dict[str, Any] = {}
        self._read: float | None = None
        self._reading: Future[None]
        self._lane = threads.shared().lane("Thread-WebApp-oidc", 1)

    def find(self, kid: str) -> Any:
        """Return the key of this id, and never wait: a separate thread reads the keys.

        Unknown ids let the keys be read again, but rarely. Known keys are used meanwhile.

        :raises Denied: there is none (401), or the keys are being read (503).
        """
        with self._lock:
            age = math.inf if self._read is None else self._monotonic() - self._read
            if age >= KEPT or (kid not in self._keys and age >= PAUSE):
                self._read, self._reading = self._monotonic(), self._lane.submit(self._refresh)
            reading = not self._reading.done()
        if kid in self._keys:
            return self._keys[kid]
        if reading:
            text = f"The keys of issuer {self._issuer} are being read; try again"
            raise Denied(http.HTTPStatus.SERVICE_UNAVAILABLE, "busy", text)
        raise _invalid(
            f"issuer {self._issuer} has published no key {kid[:80]!r}, or cannot be reached"
        )

    def _refresh(self) -> None:
        try:
            self._keys = self._fetch()
        except (OSError, ValueError, KeyError, TypeError, jwt.PyJWTError) as error:
            log.warning(
                "The keys of issuer %s cannot be read: %s: %s",
                self._issuer,
                type(error).__name__,
                error,
            )

    def _fetch(self) -> dict[str, Any]:
        found = _json(f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
        if found["issuer"] != self._issuer:
            raise ValueError(f"its configuration is of issuer {found['issuer']!r}")
        keys = {}
        for each in _json(str(found["jwks_uri"]))["keys"]:
            try:
                keys[str(each["kid"])] = jwt.PyJWK(each)
            except (KeyError, jwt.PyJWTError):
                continue  # of a type that we do not accept
        return keys


def _json(url: str) -> Any:
    """Return the JSON at a URL, which must be https unless it is on this machine.

    :raises OSError: the issuer does not answer with it in time.
    """
    if not protected(url):
        raise ValueError(f"{url!r} is not an https URL")
    trusted = ssl.get_default_verify_paths()  # of the system, as those of other programs
    # Redirects might lead to an unprotected connection.
    with (
        DirectSession() as session,
        session.get(
            url,
            timeout=TIMEOUT,
            stream=True,
            headers=UNCOMPRESSED,
            verify=trusted.cafile or trusted.capath or True,
        ) as answer,
    ):
        if answer.status_code != http.HTTPStatus.OK:
            raise OSError(f"{url} answers with status {answer.status_code}")
        return json.loads(content_of(answer, MOST_BYTES, TIMEOUT))


class Verifiers:
    """The configured issuers."""

    def __init__(
        self, issuers: Sequence[Issuer], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.issuers = list(issuers)
        self._keys = {issuer.issuer: Keys(issuer.issuer, monotonic) for issuer in issuers}

    def identify(self, token: str) -> Identity:
        """Return the job that has this token.

        :raises Denied: the token is not valid (401), or no rule permits it anything (403).
        """
        try:
            kid = jwt.get_unverified_header(token).get("kid")
            claimed = jwt.decode(token, options={"verify_signature": False}).get("iss")
        except jwt.PyJWTError as error:
            raise _invalid(f"it is not a JWT: {error}") from None
        found = [issuer for issuer in self.issuers if issuer.issuer == claimed]
        if not found or not isinstance(kid, str):
            raise _invalid(
                f"issuer {str(claimed)[:200]!r} is not configured in access: oidc, or the token "
                "names no key"
            )
        key = self._keys[found[0].issuer].find(kid)
        problem: jwt.PyJWTError | None = None
        for issuer in found:
            try:
                claims = jwt.decode(
                    token,
                    key.key,
                    algorithms=ALGORITHMS,
                    audience=issuer.audience,
                    issuer=issuer.issuer,
                    leeway=SKEW,
                    options={"require": ["exp", "iss", "aud"]},
                )
            except jwt.InvalidAudienceError as error:
                problem = error
                continue
            except (jwt.PyJWTError, TypeError, ValueError) as error:
                raise _invalid(str(error)) from None
            return _permitted(issuer, claims)
        raise _invalid(str(problem)) from None


def _permitted(issuer: Issuer, claims: Mapping[str, Any]) -> Identity:
    rule = next((rule for rule in issuer.rules if _matches(rule, claims)), None)
    if rule is None:
        text = (
            f"No rule of issuer {issuer.name} in access: oidc matches the claims of this job token"
        )
        raise Denied(http.HTTPStatus.FORBIDDEN, "not-allowed", text)
    # With the name of the issuer: no job can have the name of a user or of a token.
    owner = f"{issuer.name}:{rule.owner_of(dict(claims))}"
    if len(owner) > LONGEST_OWNER or not owner.isprintable():  # cut, two jobs might have one owner
        raise _invalid(f"the owner has control characters or more than {LONGEST_OWNER} characters")
    return Identity(
        owner,
        f"oidc:{issuer.name}",
        Role.of(rule.role),
        rule.tenant,
        tuple(rule.labels),
        rule.max,
        rule.per_owner,
        expires=int(claims["exp"]) + SKEW,
    )


def _matches(rule: Rule, claims: Mapping[str, Any]) -> bool:
    if not all(isinstance(claims.get(name), str | int) for name in rule.claims()):
        return False
    return all(_has(claims.get(name), pattern) for name, pattern in rule.match.items())


def _has(value: object, pattern: str) -> bool:
    """Return whether a claim, or one of its values, matches; only ``*`` is special."""
    if isinstance(value, list):
        return any(_has(each, pattern) for each in value)
    text = (
        str(value).lower() if isinstance(value, bool) else value if isinstance(value, str) else None
    )
    text = str(value) if text is None and isinstance(value, int) else text
    escaped = pattern.replace("[", "[[]").replace("?", "[?]")
    return text is not None and fnmatch.fnmatchcase(text, escaped)


def _invalid(text: str) -> Denied:
    return Denied(
        http.HTTPStatus.UNAUTHORIZED, "unauthorized", f"The job token is not valid: {text}"
    )
