"""Launches instances on threads of lane "write": image, offers, fleet (AWS-2.2 to 2.4)."""

from __future__ import annotations

import json
import threading
import time
import uuid
from typing import Any

from cachetools import TTLCache

from nodepool import exceptions
from nodepool.cloud import ErrorKind, translate
from nodepool.cloud.sold_out import REFUSALS, SoldOut
from nodepool.driver.aws.api.errors import AwsError, classify, code_of, kind_of_code
from nodepool.driver.aws.config import AwsLabel
from nodepool.driver.aws.launch import parameters
from nodepool.driver.aws.launch.offers import Offer

#: Error code for an instance type that does not exist in this zone.
UNSUPPORTED = "Unsupported"
#: Prefixes of the error codes for a launch template that does not exist.
NO_TEMPLATE = ("InvalidLaunchTemplateName.NotFound", "InvalidLaunchTemplateId.NotFound")

UNCLEAR = 1800.0
"""Seconds that the token of a call without a clear answer is kept."""


def _refusal(error: BaseException, single: bool) -> ErrorKind:
    """Return the kind of a refusal; unsupported types count as sold out if more offers exist."""
    return ErrorKind.CAPACITY if not single and code_of(error) == UNSUPPORTED else classify(error)


class Launching:
    """The launching part of an adapter."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self.log = adapter.log
        self.sold_out: SoldOut[Offer] = SoldOut()
        self._lock = threading.Lock()
        #: Tokens of calls with an unknown result, by their arguments.
        self._unclear: TTLCache[str, str] = TTLCache(1024, UNCLEAR, time.monotonic)

    def _create(self, method: str, **args: object) -> Any:
        """Call a method that creates something, without creating it twice when repeated.

        The token is kept when the call ends without a clear answer: the next attempt for the same
        node uses the same one and gets what the previous one has created, if anything.
        """
        wanted = json.dumps([method, args], sort_keys=True, default=str)
        with self._lock:
            token = self._unclear.pop(wanted, None) or uuid.uuid4().hex
        try:
            return self.adapter.ec2(
                method, lane="write", idempotent=True, ClientToken=token, **args
            )
        except Exception as error:
            if classify(error) is ErrorKind.TRANSIENT:
                with self._lock:
                    self._unclear[wanted] = token
            raise

    def allocate_host(self, label: AwsLabel, tags: dict[str, str]) -> str:
        """Allocate a dedicated host and return its id.

        :raises QuotaException, CapacityException: as AWS says.
        """
        args = parameters.allocate_host(label, tags)
        try:
            answer = self._create("allocate_hosts", **args)
        except Exception as error:
            raise translate(error, classify, *REFUSALS) from error
        return str(answer["HostIds"][0])

    def launch(
        self,
        label: AwsLabel,
        image_external_id: str | None,
        tags: dict[str, str],
        host_id: str | None,
    ) -> tuple[dict[str, Any], Offer]:
        """Start an instance; return what AWS reported about it and the offer that succeeded.

        :raises QuotaException: every offer exceeds a quota.
        :raises CapacityException: every offer is refused, at least one for lack of capacity.
        """
        image_id = self._image_id(label, image_external_id)
        if label.fleet:
            return self._fleet(label, image_id, tags), label.offers[0]
        image = self.adapter.cloud.image(image_id)
        single = len(label.offers) == 1
        return self.sold_out.try_in_order(
            label.offers,
            lambda offer: self._run(label, offer, image_id, image, tags, host_id),
            lambda error: _refusal(error, single),
            f"Provider {self.adapter.provider.name}, pool {label.pool.name}, label {label.name}",
            self.log,
        )

    def _image_id(self, label: AwsLabel, image_external_id: str | None) -> str:
        if image_external_id:
            return image_external_id
        image = label.cloud_image
        return str(image.image_id or self.adapter.cloud.filtered_image(image.image_filters))

    def _run(
        self,
        label: AwsLabel,
        offer: Offer,
        image_id: str,
        image: dict[str, Any],
        tags: dict[str, str],
        host_id: str | None,
    ) -> dict[str, Any]:
        args = parameters.run_instances(label, offer, image_id, image, tags, host_id)
        self.log.debug("Creating instance %s as %s", tags.get("Name"), offer.describe())
        answer = self._create("run_instances", **args)
        return answer["Instances"][0]  # type: ignore[no-any-return]

    def _fleet(self, label: AwsLabel, image_id: str, tags: dict[str, str]) -> dict[str, Any]:
        template = self.adapter.templates.name(label)
        try:
            try:
                groups = self._create_fleet(
                    parameters.create_fleet(label, template, image_id, tags)
                )
            except Exception as error:
                if not code_of(error).startswith(NO_TEMPLATE):
                    raise
                # Equal settings share a template: another provider has removed it when its own
                # configuration changed.
                self.log.warning(
                    "Launch template %s of label %s no longer exists, creating it again",
                    template,
                    label.name,
                )
                self.adapter.templates.forget(template)
                template = self.adapter.templates.name(label)
                groups = self._create_fleet(
                    parameters.create_fleet(label, template, image_id, tags)
                )
        except Exception as error:
            raise translate(error, classify, *REFUSALS) from error
        return {
            "InstanceId": groups[0]["InstanceIds"][0],
            "InstanceType": groups[0].get("InstanceType"),
        }

    def _create_fleet(self, args: dict[str, Any]) -> list[dict[str, Any]]:
        answer = self._create("create_fleet", **args)
        groups = [group for group in answer.get("Instances") or [] if group.get("InstanceIds")]
        if not groups:
            error = (answer.get("Errors") or [{}])[0]
            code = error.get("ErrorCode") or "UnfulfillableCapacity"
            raise AwsError(
                {"Code": code, "Message": error.get("ErrorMessage") or "the fleet has no instance"}
            )
        return groups

    def ended(self, instance: dict[str, Any], offer: Offer | None) -> Exception:
        """Return the exception for an instance that was terminated before it ran."""
        reason = instance.get("StateReason") or {}
        code, text = str(reason.get("Code") or ""), str(reason.get("Message") or "no reason given")
        message = f"Instance {instance['InstanceId']} was terminated: {text}"
        kind = kind_of_code(code.rpartition(".")[2])
        if kind is ErrorKind.QUOTA:
            return exceptions.QuotaException(message)
        if kind is ErrorKind.CAPACITY:
            if offer is not None:
                self.sold_out.refused(offer)
            return exceptions.CapacityException(message)
        return exceptions.LaunchStatusException(message)
