"""Making a sliver: namespaces, mounts, process 1, privileges, the filter on system calls."""
