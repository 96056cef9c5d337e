"""Root trees of slivers and the images that they are built from."""
