"""HTTP interface of the launcher (cli-web-metrics.md section 6)."""
