"""Who may use the API that changes things: the section ``access`` of the main file."""

from __future__ import annotations

import ipaddress
import re
import urllib.parse
from typing import Any, cast

import voluptuous as v

from nodepool.base.config_value import ConfigValue
from nodepool.base.option import REQUIRED, Section, load, option, schema
from nodepool.exceptions import ConfigError

ROLES = ("read", "borrow", "operate", "admin")
_ROLE = v.Any(*ROLES)
_SECONDS = v.All(int, v.Range(min=60))
#: Claims that name the owner of a lease, such as ``{repository}``.
_CLAIM = re.compile(r"\{([^{}]+)\}")


def protected(url: str) -> bool:
    """Return whether a URL is HTTPS, or HTTP on this machine."""
    parts = urllib.parse.urlsplit(url)
    local = parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1", "::1")
    return bool(parts.hostname) and (parts.scheme == "https" or local)


def _url(value: str) -> str:
    if not protected(value):
        raise v.Invalid("expected the https URL of an issuer")
    return value


def _network(value: str) -> str:
    try:
        ipaddress.ip_network(value)
    except ValueError:
        raise v.Invalid("expected an address or network such as 192.0.2.0/28") from None
    return value


class Rule(Section):
    """Which job tokens get which rights."""

    match: dict[str, str] = option(
        v.All({str: v.Any(str, bool, int)}, v.Length(min=1)),
        REQUIRED,
        "claims that must all have these values; ``*`` is a wildcard",
        convert=lambda claims: {claim: _text(value) for claim, value in claims.items()},
    )
    role: str = option(_ROLE, REQUIRED, "``read``, ``borrow``, ``operate`` or ``admin``")
    owner: str = option(
        str, REQUIRED, "owner of the leases; ``{claim}`` is replaced by the value of that claim"
    )
    tenant: str | None = option(str, None, "the only tenant of the leases")
    labels: list[str] = option([str], [], "patterns of labels that may be leased", shown="all")
    max: int | None = option(
        _SECONDS, None, "longest lease, in seconds from now", shown="that of ``leases``"
    )
    per_owner: int | None = option(
        v.All(int, v.Range(min=1)), None, "leases of one owner", shown="that of ``leases``"
    )

    def claims(self) -> list[str]:
        """Return the claims that the owner's name is made of."""
        return _CLAIM.findall(self.owner)

    def owner_of(self, claims: dict[str, Any]) -> str:
        return _CLAIM.sub(lambda found: str(claims[found[1]]), self.owner)


class Issuer(Section):
    """A system whose job tokens are accepted."""

    name: str = option(v.All(str, v.Match(r"^[\w.-]+$")), REQUIRED, "part of the owner's name")
    issuer: str = option(v.All(str, _url), REQUIRED, "URL, exactly as in the claim ``iss``")
    audience: str = option(str, REQUIRED, "the claim ``aud``, which the job has to ask for")
    rules: list[Rule] = option(
        [Rule],
        REQUIRED,
        "the first one that matches decides; none: refused",
        convert=lambda given: list(map(Rule, given)),
    )


class Limits(Section):
    """Limits of borrowers who have no others; operators have none."""

    max: int = option(
        _SECONDS, 8 * 3600, "longest lease, in seconds from now; each renewal starts a new period"
    )
    per_owner: int = option(v.All(int, v.Range(min=1)), 10, "leases of one owner, held and waiting")


def _public_key(value: str) -> str:
    # Parts only: a comment could contain anything.
    if not re.fullmatch(r"(ssh|ecdsa)-[a-z0-9@.-]+ AAAA[A-Za-z0-9+/]+=*", value.strip(), re.ASCII):
        raise v.Invalid("expected a public key without comment, such as `ssh-ed25519 AAAA...`")
    return value.strip()


class Certificates(Section):
    """The CA of SSH certificates for leases."""

    key: str = option(
        str,
        REQUIRED,
        "file with the private key of the CA, without passphrase, readable by the launcher only",
    )
    public: str = option(
        v.All(str, _public_key), REQUIRED, "its public key, without comment", convert=str.strip
    )


class AccessConfig(ConfigValue):
    """The section ``access``."""

    socket: str | None = option(
        str,
        None,
        "path of the launcher's Unix socket, such as ``/run/nodepool/api.sock``",
        shown="none",
    )
    users: dict[str, str] = option(
        {str: _ROLE},
        {},
        "role of users on that socket, by name, ``@group`` or ``*``; root is ``admin``",
    )
    proxies: list[str] = option(
        [v.All(str, _network)],
        [],
        "addresses of proxies that terminate TLS and set X-Forwarded-For and -Proto",
    )
    leases: Limits = option(Limits, cast(Any, {}), "limits of borrowers", convert=Limits, shown="")
    certificates: Certificates | None = option(
        Certificates,
        None,
        "CA of SSH certificates for leases",
        convert=lambda given: Certificates(given) if given else None,
    )
    oidc: list[Issuer] = option(
        [Issuer],
        [],
        "systems whose job tokens are accepted",
        convert=lambda given: list(map(Issuer, given)),
    )

    def __init__(self, options: object = None) -> None:
        """Load the section.

        :raises ConfigError: an option is invalid; names its path in the section.
        """
        given = {} if options is None else options
        try:
            v.Schema(schema(AccessConfig))(given)
        except v.MultipleInvalid as error:
            first = error.errors[0]
            where = [item if isinstance(item, int) else str(item) for item in first.path]
            raise ConfigError(first.error_message, where=where) from None
        assert isinstance(given, dict)
        load(self, given)
        self.networks = [ipaddress.ip_network(each) for each in self.proxies]


def _text(value: object) -> str:
    """Return a claim as text; YAML reads true and 12 as other types."""
    return str(value).lower() if isinstance(value, bool) else str(value)
