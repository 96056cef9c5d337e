"""Uploading images to providers: decisions, each upload, its journal and its progress."""
