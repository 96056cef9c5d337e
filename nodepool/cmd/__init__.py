"""Entry points of the commands and daemons."""
