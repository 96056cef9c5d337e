"""Root trees of slivers and the images they come from."""
