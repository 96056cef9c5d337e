"""Tags, labels and properties with values from the request (DRV-7)."""

from __future__ import annotations

from collections.abc import Mapping

from nodepool.logconfig import Log
from nodepool.zk.records import NodeRequest


def formatted(
    templates: Mapping[str, str] | None, request: NodeRequest | None, log: Log, what: str
) -> dict[str, str]:
    """Return the formatted templates; invalid ones are logged and omitted.

    :param what: for the message, such as "tag".
    """
    if not templates or request is None:
        return {}
    found, attributes = {}, request.getSafeAttributes()
    for key, template in templates.items():
        try:
            found[key] = template.format(request=attributes)
        except Exception as error:
            log.warning(
                "Dynamic %s %s (%s) cannot be formatted, omitting it: %r",
                what,
                key,
                template,
                error,
            )
    return found
