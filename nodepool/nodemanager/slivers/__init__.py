"""Brings slivers to what their records want."""
