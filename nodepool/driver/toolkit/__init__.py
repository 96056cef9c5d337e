"""Reusable parts for drivers: threads per node, caches, rate limits, image uploads."""
