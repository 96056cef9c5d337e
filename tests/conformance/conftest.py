"""Clouds that several tests use."""

from tests.support.aws.cloud import aws  # noqa: F401
