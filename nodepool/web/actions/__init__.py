"""The calls below ``/api/v1`` that change something.

Holders have calls on leases, operators on nodes, requests and images.

:mod:`.bodies`     JSON of calls and answers
:mod:`.routes`     a table of the calls: who may make them, what they answer
:mod:`.leases`     calls on leases
:mod:`.operators`  calls of operators
:mod:`.waiting`    hand-over of leases, long polls
:mod:`.openapi`    the OpenAPI document
:mod:`.actions`    receives the calls
"""
