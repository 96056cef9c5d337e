"""The API server of a Kubernetes cluster: credentials, plain calls, watches. No other part of the driver speaks HTTP."""
