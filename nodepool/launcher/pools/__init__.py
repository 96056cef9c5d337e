"""One provider pool: its thread, its capacity, its helper threads."""
