"""Version of the installed package (DRV-10)."""

from __future__ import annotations

import functools

#: As in setup.cfg.
FALLBACK = "12.0.0"


class VersionInfo:
    """Version information that external code imports as ``version_info``."""

    def version_string(self) -> str:
        import importlib.metadata  # takes 10 ms, and most commands do not need it

        try:
            return importlib.metadata.version("nodepool")
        except importlib.metadata.PackageNotFoundError:
            return FALLBACK


version_info = VersionInfo()


@functools.cache
def get_version_string() -> str:
    """Return the release, for ``--version`` and the component records.

    Reading the metadata of the package takes 1 ms, and each report of a launcher contains the
    release.
    """
    return version_info.version_string()
