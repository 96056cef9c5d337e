"""Providers of a configuration, under the name that external code imports (DRV-4)."""

from nodepool.driver.lifecycle import ProviderManager, get_provider, is_silent, provider_problems

__all__ = ["ProviderManager", "get_provider", "is_silent", "provider_problems"]
