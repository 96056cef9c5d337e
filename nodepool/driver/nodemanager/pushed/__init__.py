"""Node managers on nodes of other providers, pushed there over SSH (NM-C.8, ``backing-label``)."""
