"""One provider pool: its thread, its room, its helpers."""
