"""A cloud that tests can ask and disturb behind the driver's back."""

from __future__ import annotations

from typing import Any

LABEL = "conform"
PROVIDER = "conforming"


class Unsupported(Exception):
    """The cloud cannot be made to do this; the text is for whoever reads the list of skipped
    tests.
    """


class CloudUnderTest:
    """To be subclassed once for each driver. What is not overridden is skipped, with the reason
    given here.
    """

    #: Whether the cloud lives on when the launcher is killed.
    outside = False
    #: Seconds in which a launch or a deletion is certainly over.
    patience = 30.0

    def provider(self) -> dict[str, Any]:
        """The provider :data:`PROVIDER` with one pool that has the label :data:`LABEL`, as in a
        configuration file.
        """
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """What launchers need in their environment to find the cloud."""
        return {}

    def attach(self, pool: Any) -> None:
        """A launcher in this process has started."""

    def instances(self) -> set[str]:
        """Ids of all that exists and is not on its way out, as the cloud has them."""
        raise NotImplementedError

    @staticmethod
    def instance_of(external_id: Any) -> str:
        """The id of the instance in a node's external_id."""
        return str(external_id)

    def metadata(self, instance: str) -> dict[str, str]:
        """Tags, or whatever they are called."""
        raise Unsupported("this cloud keeps no metadata")

    def remove(self, instance: str) -> None:
        """Somebody deletes it; also how spot instances end."""
        raise Unsupported("nobody else can delete an instance of this cloud")

    def halt(self, instance: str) -> None:
        """Somebody stops it, or its host fails; it is still listed."""
        raise Unsupported("an instance of this cloud cannot be stopped")

    def limit(self, instances: int | None) -> None:
        """The account may have this many instances; None: as many as it likes."""
        raise Unsupported("this cloud has no quota")

    def sold_out(self, yes: bool) -> None:
        """The cloud has no capacity at present."""
        raise Unsupported("this cloud never runs out of room")

    def down(self, yes: bool) -> None:
        """The API does not answer, or with rubbish."""
        raise Unsupported("the API of this cloud is a part of the launcher")

    def unanswered(self) -> int:
        """Calls since it is down."""
        raise Unsupported("calls are not counted")

    def throttle(self, calls: int) -> int:
        """The next calls are asked to come back later."""
        raise Unsupported("this cloud takes any number of calls")

    def throttled(self) -> int:
        """How many of them were."""
        return 0

    def pause(self, yes: bool) -> None:
        """Instances do not become ready."""
        raise Unsupported("instances of this cloud are ready at once")

    def stray(self, metadata: dict[str, str]) -> str:
        """An instance with this metadata that no launcher knows; its id."""
        raise Unsupported("nothing can be started in this cloud but by the driver")

    def close(self) -> None:
        """Also when a test failed half-way: undo all of the above, and delete what is there."""
