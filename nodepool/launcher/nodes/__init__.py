"""Existing nodes: deletion, deallocation, ages, checks of ready ones."""
