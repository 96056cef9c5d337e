#!/usr/bin/env python3
"""Check a commit message: git hook commit-msg, installed by pre-commit.

tools/commit_message.py FILE    print what is wrong in the message; exit status 1 if something is
"""

from __future__ import annotations

import sys
from pathlib import Path

MOST_CHARACTERS = 72
#: Subjects that git writes.
BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")
SCISSORS = "# ------------------------ >8 ------------------------"


def problems(message: str) -> list[str]:
    """Return what is wrong in the message, one sentence each."""
    lines = [
        line.rstrip()
        for line in message.partition(SCISSORS)[0].splitlines()
        if not line.startswith("#")
    ]
    while lines and not lines[0]:
        del lines[0]
    if not lines:
        return []  # git itself refuses an empty message
    subject = lines[0]
    if subject.startswith(BY_GIT):
        return []
    found = []
    if len(subject) > MOST_CHARACTERS:
        found.append(f"The subject has {len(subject)} characters; the limit is {MOST_CHARACTERS}.")
    if subject.endswith("."):
        found.append("The subject ends with a period; remove it.")
    if "; " in subject:
        found.append(
            'The subject has "; " and may describe two changes; make two commits, or name what '
            "they have in common."
        )
    if len(lines) > 1 and lines[1]:
        found.append("The second line is not blank; separate the subject from the body.")
    return found


def main(path: str) -> int:
    found = problems(Path(path).read_text(encoding="utf-8"))
    for problem in found:
        print(f"commit message: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
