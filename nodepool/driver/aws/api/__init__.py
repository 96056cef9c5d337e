"""Calls of AWS: clients, credentials, errors, shared polls."""
