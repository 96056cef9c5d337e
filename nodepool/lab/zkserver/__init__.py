"""A small ZooKeeper server for development, tests and demonstrations.

It speaks ZooKeeper's wire protocol, so kazoo, Zuul and every Nodepool connect to it unchanged. It
is one process without a quorum: do not use it in production, where its data would be lost with its
disk.

====================  =====================================================================
:mod:`.codec`         numbers, strings, records and error codes of the wire protocol
:mod:`.tree`          znodes, versions, transactions, access control
:mod:`.watches`       one-shot, persistent and persistent recursive watches
:mod:`.core`          the server without I/O: connections, sessions, ``tick``
:mod:`.requests`      the operations
:mod:`.journal`       transactions and snapshots on disk
:mod:`.serve`         the server on sockets: TCP, TLS and Unix
====================  =====================================================================
"""
