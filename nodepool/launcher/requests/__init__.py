"""Node requests: which is next, which pool serves it, which ones wait and why."""
