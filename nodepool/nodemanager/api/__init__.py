"""The API of the node manager: connections, callers, methods."""
