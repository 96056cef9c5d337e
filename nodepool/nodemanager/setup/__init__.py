"""Making a sliver: namespaces, mounts, process 1."""
