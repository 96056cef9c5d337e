"""Why calls of forges fail.

Imported only with the extra of a forge: it needs urllib3.
"""

from __future__ import annotations

from urllib3.exceptions import MaxRetryError


def is_untrusted(error: Exception) -> bool:
    """Return whether the certificate of a forge was refused: a later call fails, too."""
    return "CERTIFICATE_VERIFY_FAILED" in str(error)


def reason_of(error: Exception) -> str:
    """Return why a forge does not answer, without the URL that the library repeats."""
    reason = error.args[0] if error.args else type(error).__name__
    if isinstance(reason, MaxRetryError):
        reason = reason.reason
    return f"{reason}; if the certificate is right, set ca-file to that of its authority" if is_untrusted(error) else str(reason)
