"""Error kinds of OpenStack, by names and HTTP statuses: the SDK need not be loaded."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

from nodepool import exceptions
from nodepool.answers import requested_pause
from nodepool.cloud import ErrorKind, bounded
from nodepool.cloud.errors import CallTimeout

# Names of exception classes of the SDK, keystoneauth and requests.
CONFIGURATION = frozenset(
    (
        "AuthorizationFailure",
        "AuthPluginException",
        "MissingAuthPlugin",
        "MissingRequiredOptions",
        "NoMatchingPlugin",
        "Unauthorized",
        "UnsupportedParameters",
        "ConfigException",
        "EndpointNotFound",
        "CatalogException",
        "ServiceDisabledException",
        "SSLFailure",
        "ValidationException",
    )
)
TRANSIENT = frozenset(
    (
        "ConnectionError",
        "ConnectionException",
        "DiscoveryFailure",
        "ServiceDiscoveryException",
        "UnknownConnectionError",
        "RequestException",
        "VersionNotAvailable",
        "InvalidResponse",
        # "the service has no supported versions": the result of an unreadable version document
        "NotSupported",
    )
)
#: The volume service does not exist.
ABSENT_SERVICE = ("EndpointNotFound", "CatalogException", "ServiceDisabledException")
FULL = (
    "no valid host",
    "not enough hosts available",
    "no more ip addresses available",
    "insufficient capacity",
    "unable to find any ip address on external network",
)


#: Exceptions that are already the launcher's.
DECIDED = (
    exceptions.QuotaException,
    exceptions.CapacityException,
    exceptions.OfferRefusedException,
)


class BadAnswer(RuntimeError):
    """The response is not from this service: empty, truncated, HTML of a gateway."""


class CredentialsRefused(Exception):
    """The identity service does not accept the credentials in clouds.yaml."""


class TokenRefused(CredentialsRefused):
    """A service does not accept the token, which has probably expired or was revoked."""

    def __init__(self, message: str, token: str | None) -> None:
        super().__init__(message)
        self.token = token


class RefusedByCloud(exceptions.LaunchNodepoolException):
    """The cloud refuses the server because of one of the label's options."""


def sdk_error(exc: BaseException, *names: str) -> bool:
    """Return whether *exc* is one of these exceptions of the SDK, without importing it."""
    return any(cls.__name__ in names for cls in type(exc).__mro__)


def status_of(exc: BaseException) -> int:
    """Return the HTTP status, 0 when there is none."""
    for name in ("status_code", "http_status"):
        value = getattr(exc, name, None)
        if isinstance(value, int):
            return value
    return 0


#: Format in which nova and cinder quote data that violates their schema; the rest of the text
#: repeats it.
_REFUSED_VALUE = re.compile(
    r"Invalid input for (?:field/attribute|query parameters) .{1,300}?\. Value: ", re.DOTALL
)
_WHAT_IS_WRONG = re.compile(
    r"\b(?:is too (?:long|short)|is not of type [a-z', ]{1,80}|does not match (?:any of the "
    r"regexes: )?'[^']{1,200}'"
    r"|is not valid under any of the given schemas|is not one of \[[^\]]{1,200}\]|is not a "
    r"'[a-z-]{1,30}'"
    r"|is (?:less|greater) than the (?:minimum|maximum) of \d+|has non-unique elements"
    r"|Additional properties are not allowed \([^()]{1,200}\))\.?\s*\Z"
)
LEFT_OUT = "(omitted)"


def without_values(text: str, *secrets: str) -> str:
    """Return the error text without values: userdata and metadata must not be in logs.

    :param secrets: texts that are removed wherever they occur.
    """
    for secret in secrets:
        text = text.replace(secret, LEFT_OUT)
    found = _REFUSED_VALUE.search(text)
    if found is not None:
        wrong = _WHAT_IS_WRONG.search(text[max(found.end(), len(text) - 400) :])
        text = text[: found.end()] + LEFT_OUT + (f", {wrong[0]}" if wrong else "")
    return bounded(text)


def tidy(error: BaseException, *secrets: str) -> None:
    """Apply :func:`without_values` to the error and its causes, which tracebacks show, too."""
    following: BaseException | None = error
    seen: set[int] = set()
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        following.args = tuple(
            without_values(item, *secrets) if isinstance(item, str) else item
            for item in following.args
        )
        for name in ("message", "details"):
            text = getattr(following, name, None)
            if isinstance(text, str):
                with contextlib.suppress(AttributeError, TypeError):
                    setattr(following, name, without_values(text, *secrets))
        following = following.__cause__ or following.__context__


def is_quota(message: str) -> bool:
    """Return whether the cloud's text mentions an exceeded quota."""
    text = message.lower()
    return (
        ("quota" in text and "exceed" in text)
        or "number of ports exceeded" in text
        or "limit exceeded" in text
    )


def is_full(message: str) -> bool:
    """Return whether the cloud's text says that it has no capacity."""
    text = message.lower()
    return any(sign in text for sign in FULL)


def classify(error: BaseException) -> ErrorKind:
    """Return the kind of any exception of a call."""
    if isinstance(error, CallTimeout):
        return error.kind
    if isinstance(error, (CredentialsRefused, exceptions.RuntimeConfigurationException)):
        return ErrorKind.CONFIGURATION
    if isinstance(error, (BadAnswer, OSError)) and not status_of(error):
        return ErrorKind.TRANSIENT
    status = status_of(error)
    if status:
        return _kind_of_status(status, str(error), retry_after(error) is not None)
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & CONFIGURATION:
        return ErrorKind.CONFIGURATION
    if names & TRANSIENT:
        return ErrorKind.TRANSIENT
    return ErrorKind.OTHER


def _kind_of_status(status: int, message: str, may_retry: bool) -> ErrorKind:
    if status == 404:
        return ErrorKind.NOT_FOUND
    if status in (403, 409, 413) and is_quota(message) and not may_retry:
        return ErrorKind.QUOTA
    if status in (413, 429) or (status == 503 and may_retry):
        return ErrorKind.THROTTLED
    if status in (400, 409) and is_full(message):
        return ErrorKind.CAPACITY
    if status in (400, 401, 403):
        return ErrorKind.CONFIGURATION
    if status >= 500 or status == 408:
        return ErrorKind.TRANSIENT
    return ErrorKind.OTHER


def is_overload(error: BaseException) -> bool:
    """Return whether the cloud, or its gateway, is overloaded: fewer calls help."""
    return status_of(error) == 503


def retry_after(error: BaseException) -> float | None:
    """Return the seconds to wait that the cloud asks for; None when it does not."""
    headers: object = getattr(getattr(error, "response", None), "headers", None)
    if not isinstance(headers, Mapping):
        return None
    return requested_pause(headers)


#: Words in the cloud's text, and the option that they refer to.
_OPTIONS = (
    ("key_name", "key-name"),
    ("keypair", "key-name"),
    ("availability zone", "availability-zones"),
    ("availability_zone", "availability-zones"),
    ("security group", "security-groups"),
    ("security_group", "security-groups"),
    ("server group", "server-group"),
    ("scheduler_hints", "scheduler-hints"),
    ("scheduler hint", "scheduler-hints"),
    ("volume type", "volume-type"),
    ("volume_type", "volume-type"),
    ("volume", "boot-from-volume"),
    ("block device", "boot-from-volume"),
    ("network", "networks"),
    ("userdata", "userdata"),
    ("user_data", "userdata"),
    ("metadata", "instance-properties"),
    ("flavor", "flavor-name"),
    ("image", "cloud-image/diskimage"),
)


def suspect(message: str) -> str | None:
    """Return the option of the label that a refusal is about, if it can be determined."""
    return next(iter(_suspects(message)), None)


def _suspects(message: str) -> list[str]:
    text = message.lower()
    return [option for sign, option in _OPTIONS if sign in text]


#: Options whose values are looked up in the cloud and cached, and the kinds of cached answers;
#: others are not cached.
_LOOKUPS = {
    "availability-zones": ("zones",),
    "networks": ("networks", "network"),
    "flavor-name": ("flavors",),
    "cloud-image/diskimage": ("image",),
    "boot-from-volume": ("image",),
    "server-group": ("server-group",),
    "scheduler-hints": ("server-group",),
}


def suspected_lookups(message: str) -> set[str] | None:
    """Return the kinds of cached answers that a refusal may be about; None: any."""
    options = _suspects(message)
    return {kind for option in options for kind in _LOOKUPS.get(option, ())} if options else None


def given(
    option: str, label: Any, zone: str | None, image: Mapping[str, Any], flavor: str | None = None
) -> str:
    """Return the option's value in brackets; empty for those that may contain secrets.

    :param flavor: the one of several; its zone is ``zone``.
    """
    values = {
        "key-name": label.key_name,
        "availability-zones": zone if flavor else label.azs or zone,
        "server-group": label.server_group,
        "security-groups": label.security_groups or label.pool.security_groups,
        "networks": label.networks,
        "volume-type": label.volume_type,
        "flavor-name": flavor or label.flavor_name,
        "cloud-image/diskimage": image.get("name") or image.get("id"),
    }
    value = values.get(option)
    text = (
        ", ".join(str(item) for item in value)
        if isinstance(value, (list, tuple))
        else str(value or "")
    )
    return f" ({text})" if text else ""


def launch_error(
    exc: Exception,
    provider: str,
    label: Any,
    zone: str | None,
    image: Mapping[str, Any],
    server_id: str | None,
    flavor: str | None = None,
) -> Exception:
    """Return the exception for the launcher after a failed server call, or *exc* itself.

    :param server_id: None when the server was to be created.
    :param flavor: the one of several.
    """
    if isinstance(exc, DECIDED):
        return exc
    message = without_values(str(exc))
    kind = classify(exc)
    if (
        kind is ErrorKind.QUOTA
        or "quota exceeded" in message.lower()
        or "number of ports exceeded" in message.lower()
    ):
        return exceptions.QuotaException(f"Quota exceeded: {message}")
    if kind is ErrorKind.CAPACITY:
        return exceptions.CapacityException(message)
    where = f"provider {provider}, pool {label.pool.name}, label {label.name}"
    if kind is ErrorKind.CONFIGURATION and sdk_error(
        exc, "BadRequestException", "ForbiddenException"
    ):
        if server_id is not None:
            return RefusedByCloud(
                f"{where}: the cloud refuses to give server {server_id} an address: {message}"
            )
        option = suspect(message)
        about = (
            f", because of option {option}{given(option, label, zone, image, flavor)}"
            if option
            else ""
        )
        return RefusedByCloud(f"{where}: the cloud refuses to create the server{about}: {message}")
    if isinstance(exc, exceptions.RuntimeConfigurationException):
        return exceptions.LaunchNodepoolException(f"{where}: {message}")
    return exc
