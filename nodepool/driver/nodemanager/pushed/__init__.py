"""Node managers that are pushed to nodes of other providers (NM-C.8, ``backing-label``)."""
