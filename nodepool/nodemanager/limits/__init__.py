"""Limits of slivers: disk, cores, daily bytes; `cgroups`: CPU, memory and processes."""
