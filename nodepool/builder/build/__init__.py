"""Making an image: when, with which command, and what its output means."""
