"""Deleting images: retention, records, files, and images that only a cloud still has."""
