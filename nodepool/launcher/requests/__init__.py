"""Node requests: which is next, which pool takes it, who waits and why."""
