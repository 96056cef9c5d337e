"""The single-threaded helper that forks for the daemon, and its operations."""
