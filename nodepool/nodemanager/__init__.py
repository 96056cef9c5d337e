"""The node manager: divides one machine into isolated nodes (NM)."""
