"""Configuration of a running daemon: noticing changes, and keeping the last good one."""
