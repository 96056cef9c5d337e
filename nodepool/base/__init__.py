"""Parts that everything may use and that use nothing of ours."""
