"""The node manager on a machine that a launcher uses temporarily."""
