"""Quota: limits, usage, and the needs of labels."""
