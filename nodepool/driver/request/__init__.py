"""One node request from acceptance to its end.

``life`` serves the request, phase by phase; ``engine`` passes events and answers of ZooKeeper to
it; ``writes`` are its transactions. ``state`` has the states of a request and the allowed events in
each; ``base`` is what drivers see and implement, with the interface of their pool; ``handler`` is
the base of all drivers' handlers.
"""
