"""Sending images to providers: what is wanted, each upload, its journal and its progress."""
