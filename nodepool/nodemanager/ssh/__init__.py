"""SSH into slivers."""
