"""Clouds that several tests use."""

from tests.aws_cloud import aws  # noqa: F401
