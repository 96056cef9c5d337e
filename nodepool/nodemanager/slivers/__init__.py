"""Reconciles slivers with their records."""
