"""Records of slivers: their content, their storage and their loans."""
