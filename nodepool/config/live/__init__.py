"""Configuration of a running daemon: reload after changes, keep the last valid one."""
