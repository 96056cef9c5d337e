"""Replay demand against a configuration in virtual time, and search for a better one.

The launcher runs unchanged, with its own drivers for ``static`` and ``metastatic`` nodes and with a
model of the machines of all other drivers. Needs the extra ``simulate`` (greenlet).

====================  =====================================================================
:mod:`.demand`        the requests: from a trace (CSV) or from the launcher's history
:mod:`.assumptions`   what a configuration does not say: launch times, sizes, quotas
:mod:`.replay`        one run, in a separate process
:mod:`.machines`      providers without a cloud
:mod:`.client`        a client that behaves like Zuul
:mod:`.link`          connections to ZooKeeper without sockets
:mod:`.measures`      measures of a run, and their summary
:mod:`.report`        tables and the chart
:mod:`.advise`        search for a better configuration
:mod:`.edit`          changes in the text of the configuration
====================  =====================================================================
"""
