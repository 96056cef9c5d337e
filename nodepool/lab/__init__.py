"""Nodepool without machines: ZooKeeper, simulated world, what-if, ``nodepool dev``."""
