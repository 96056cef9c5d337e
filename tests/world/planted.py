"""A plugin of pytest that plants a defect of :mod:`tests.world.mutations` before the tests are
collected.

``NODEPOOL_PLANTED=NAME python -m pytest -p tests.world.planted TEST``
"""

from __future__ import annotations

import os
import sys

import pytest

from tests.world import lines, mutations

#: The environment variable with the name of the defect.
NAME = "NODEPOOL_PLANTED"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    name = os.environ[NAME]
    module, change = mutations.MUTATIONS[name].module, mutations.change(name)
    # Now, and not when the module is imported: that may be within a test, which is expected to
    # fail.
    change(module, mutations.path(module).read_text())
    lines.replace_text(module, change)


def pytest_sessionfinish(session: pytest.Session) -> None:
    name = os.environ[NAME]
    module = mutations.MUTATIONS[name].module
    if module not in sys.modules:
        print(f"the tests do not import {module}, in which {name} is planted", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.USAGE_ERROR
