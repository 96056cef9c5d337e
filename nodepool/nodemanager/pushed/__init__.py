"""The node manager on a machine that a launcher has for a while."""
