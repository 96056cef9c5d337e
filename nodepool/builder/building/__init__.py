"""Building an image: when to build, which command to run, and what its output means."""
