"""``nodepool dev``: a whole installation for one user on one machine.

It is meant for trying and developing. ZooKeeper is :mod:`nodepool.lab.zkserver`; nodes are slivers
of this machine if it can create them, otherwise records of the ``fake`` driver.
"""
