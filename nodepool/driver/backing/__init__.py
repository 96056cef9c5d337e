"""Nodes that carry other nodes: slots, requests for backing nodes, their release (MST)."""
