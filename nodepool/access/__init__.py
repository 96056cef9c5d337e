"""Who may do what over the API, and what they did.

:mod:`.identity`  roles, callers
:mod:`.access`    identifies the caller of an HTTP request
:mod:`.tokens`    tokens of people and programs, in ZooKeeper
:mod:`.oidc`      job tokens of CI systems
:mod:`.audit`     what callers did
"""
