"""What is checked before a configuration is used."""
