"""Stand-ins for clouds of which no server can be had: their APIs, stateful, over TLS, behind the
fault proxy.
"""
