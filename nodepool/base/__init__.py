"""Basic modules: every other package may use them, and they use none of ours."""
