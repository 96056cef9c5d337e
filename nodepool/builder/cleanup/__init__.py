"""Removing images: what is kept, records, files, and images that only a cloud still has."""
