"""A command on a node, whose status says whether the node is healthy."""

from __future__ import annotations

import time
from typing import Any

from nodepool import ssh
from nodepool.config.model import Probing
from nodepool.texts import one_line

#: Bytes of the output that are kept.
OUTPUT = 2000


def failure(node: ssh.Node, probing: Probing, running: set[Any]) -> str | None:
    """Run the command; return why the node is not healthy, None: it is.

    It ends within the timeout, and ten seconds in which a late command is killed.

    :param running: gets the local program, whose end ends the attempt.
    :raises OSError, ValueError: this machine cannot log in to any node; the text says why.
    """
    output = ssh.Kept(OUTPUT)
    deadline = time.monotonic() + probing.timeout
    key, command = probing.ssh_key or "", probing.command or ""
    try:
        status = ssh.run_with_key(node, key, command, output, deadline, running)
    except ssh.Interrupted as error:
        return one_line(f"its command has no end: {error}")
    except (ssh.Lost, TimeoutError) as error:
        if not str(error):
            return f"its command has not ended within {probing.timeout} s"
        return one_line(f"cannot log in as {node.username}: {error}")
    if status == 0:
        return None
    lines = output.content().decode("utf-8", "replace").split("\n")
    said = next((line for each in reversed(lines) if (line := one_line(each))), "")
    return f"its command has ended with status {status}{f': {said}' if said else ''}"
