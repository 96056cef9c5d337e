"""HTTP interface of the launcher (CLI-6)."""
