"""Client of the API server: credentials, calls, watches; all HTTP code of the driver."""
