"""Parts that drivers may use: threads per node, caches, pacing, image uploads."""
