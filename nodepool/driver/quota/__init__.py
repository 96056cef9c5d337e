"""What quota there is, what is used, what labels need."""
