"""Tests that run in virtual time; see tests/world/README.rst."""
