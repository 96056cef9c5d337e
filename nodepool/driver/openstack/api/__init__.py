"""Calls of OpenStack: what adapters may ask (`protocol`), and the client that asks real clouds."""
