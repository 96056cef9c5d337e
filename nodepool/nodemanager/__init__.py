"""The node manager: one machine, many isolated nodes (NM)."""
