"""Records of slivers: what they say, where they are kept, what is lent."""
