"""One node request from acceptance to its end.

``state`` has the states of a request and the allowed events in each; ``base`` is what drivers see and implement,
``handler`` fills the node set, ``ends`` writes how it ends, ``step`` is one write, ``host`` is the interface of a
handler to its pool.
"""
