"""Drivers of clouds of which there are stand-ins only."""
