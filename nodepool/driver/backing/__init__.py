"""Nodes that carry other nodes: which slots are whose, asking for backing nodes, giving them back (MST)."""
