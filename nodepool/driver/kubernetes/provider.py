"""The provider of namespaces and pods."""

from __future__ import annotations

from nodepool.driver.quota.amounts import QuotaInformation
from nodepool.driver.statemachine.provider import StateMachineProvider


class KubernetesProvider(StateMachineProvider):
    def unmanagedQuotaUsed(self) -> QuotaInformation:
        """Return no usage: the configured limits are for our nodes only (KUB-9)."""
        return QuotaInformation()
