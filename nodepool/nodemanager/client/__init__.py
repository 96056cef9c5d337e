"""The part of the node manager that drivers and commands import."""
