"""For another release in a separate process: what it asks of public hosts goes to a stand-in.

``NODEPOOL_BENCHMARK_HOSTS``: ``https://host=https://127.0.0.1:port``, separated by blanks.
"""

import os

HOSTS = dict(pair.split("=", 1) for pair in os.environ.get("NODEPOOL_BENCHMARK_HOSTS", "").split())


def elsewhere(url):
    for host, address in HOSTS.items():
        if url.startswith(host):
            return url.replace(host, address, 1)
    return url


try:
    import requests.adapters
except ImportError:
    pass
else:
    send = requests.adapters.HTTPAdapter.send

    def redirected(self, request, *args, **keywords):
        request.url = elsewhere(request.url)
        return send(self, request, *args, **keywords)

    requests.adapters.HTTPAdapter.send = redirected

try:
    import httplib2
except ImportError:
    pass
else:
    ask = httplib2.Http.request

    def redirected_request(self, uri, *args, **keywords):
        return ask(self, elsewhere(uri), *args, **keywords)

    httplib2.Http.request = redirected_request
