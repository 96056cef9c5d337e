"""Nodes that exist: deletion, deallocation, ages, checks of ready ones."""
