"""Node managers on nodes of other providers, pushed there over SSH (nodemanager.md C.8, ``backing-label``)."""
