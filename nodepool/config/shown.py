"""A configuration as people may see it: what may be a secret is left out."""

from __future__ import annotations

import json
import re
from typing import Any

from nodepool.config.model import Config

_SECRET = re.compile(r"pass|secret|token|credential|user-?data|custom-data|env-?vars|auth|(^|-)key$", re.IGNORECASE)
#: Name and password in an address.
_USER = re.compile(r"(?<=://)[^/\s@]+@")
REDACTED = "(redacted)"


def redacted(value: Any, secret: bool = False) -> Any:
    """The value with everything left out whose name may be that of a secret, and names and passwords in addresses."""
    if isinstance(value, dict):
        return {str(key): redacted(item, secret or bool(_SECRET.search(str(key)))) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(item, secret) for item in value]
    if secret and value not in (None, True, False):
        return REDACTED
    return _USER.sub(f"{REDACTED}@", value) if isinstance(value, str) else value


def shown(config: Config) -> dict[str, Any]:
    """What is in force, as JSON has it."""
    content = {
        "labels": {name: {"min-ready": label.min_ready} for name, label in sorted(config.labels.items())},
        "diskimages": {
            name: {
                "elements": image.elements, "formats": sorted(image.image_types), "release": image.release,
                "rebuild-age": image.rebuild_age, "pause": image.pause,
            }
            for name, image in sorted(config.diskimages.items())
        },
        "providers": {name: redacted(provider.provider) for name, provider in sorted(config.providers.items())},
        "tenant-resource-limits": config.tenant_resource_limits,
    }  # fmt: skip
    # What YAML has and JSON has not, such as dates, becomes text.
    found: dict[str, Any] = json.loads(json.dumps(content, default=str))
    return found
