"""Machines of the pool for other CI systems; imports only ``nodepool.client``."""
