"""Images that are verified before launchers use them, of which some do not work (BLD-25)."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from tests.world import logins

if TYPE_CHECKING:
    from tests.world.world import Scenario

#: The part of the seeds with images in which these are verified, and of their images that do not
#: work unless the seed has no faults.
SHARE, BROKEN = 0.5, 0.4
#: Seconds that launchers try a machine.
TIMEOUT = 10
#: Seconds by which an image is usable later than without verification, without faults.
LONGER = 20.0
#: The requestor of machines for verifications.
VERIFIER = "NodePool:verify"


def extend(scenario: Scenario) -> None:
    """Verify the images of some scenarios that have some."""
    choice = random.Random(f"verified {scenario.seed}")
    if not scenario.images.builders or choice.random() >= SHARE:
        return
    scenario.images.verified = True
    scenario.images.broken = BROKEN if scenario.faults else 0.0
    # Who uses an upload without verification gets what it is.
    scenario.image_actions = [each for each in scenario.image_actions if each.kind != "rollforward"]
    for request in scenario.demand:
        if not scenario.faults and any(label.endswith("-node") for label in request.labels):
            request.arrives += LONGER


def configure(images: list[dict[str, Any]]) -> None:
    """Add the option to the images of a configuration."""
    for image in images:
        image["verify"] = logins.options(TIMEOUT)
