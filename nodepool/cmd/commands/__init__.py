"""Subcommands of ``nodepool``, one module per noun; each has ``register(subparsers)``."""
