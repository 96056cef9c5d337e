"""One node request from acceptance to its end.

``state`` says in which states a request can be and what may happen in each; ``base`` is what drivers see and implement,
``handler`` fills the node set, ``ends`` writes how it ends, ``step`` is what is written at one time, ``host`` what a handler
needs of its pool.
"""
