"""API of OpenStack for adapters (`protocol`), and the client of real clouds."""
