"""``nodepool dev``: a whole installation for one user on one machine, for trying and developing.

ZooKeeper is :mod:`nodepool.zkserver`; nodes are slivers of this machine where it can make them, otherwise records of
the ``fake`` driver.
"""
