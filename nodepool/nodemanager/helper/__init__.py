"""The single-threaded helper that forks for the daemon, and what it runs."""
