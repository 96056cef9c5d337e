"""Loans: parts of an RSpec lent to other slivers of the host (NM-A.7, NM-B.2); no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nodepool.nodemanager.records.rspec import FLOORS, LOANABLE, MAXIMUM, UNLIMITED_AT_ZERO

#: Recipient, resource, amount.
Loan = tuple[str, str, int]
MAX_LOANS = 1000


class LoanError(ValueError):
    """The list of loans is malformed; the text has the position."""


def validate(given: object) -> list[Loan]:
    """Return the checked list of loans; one bare triple counts as a list of one.

    :raises LoanError: it is malformed.
    """
    if not isinstance(given, (list, tuple)):
        raise LoanError("loans: must be a list of [recipient, resource, amount]")
    if len(given) == 3 and isinstance(given[0], str) and isinstance(given[1], str):
        given = [given]
    if len(given) > MAX_LOANS:
        raise LoanError(f"loans: more than {MAX_LOANS}")
    result: list[Loan] = []
    for number, item in enumerate(given, 1):
        if not isinstance(item, (list, tuple)) or len(item) != 3:
            raise LoanError(f"loan {number}: must be exactly [recipient, resource, amount]")
        recipient, resource, amount = item
        if not isinstance(recipient, str) or not isinstance(resource, str):
            raise LoanError(f"loan {number}: recipient and resource must be texts")
        if resource not in LOANABLE:
            raise LoanError(
                f"loan {number}: {resource[:60]!r} cannot be lent; loanable are "
                f"{', '.join(sorted(LOANABLE))}"
            )
        if isinstance(amount, bool) or not isinstance(amount, int) or not 0 < amount <= MAXIMUM:
            raise LoanError(f"loan {number}: the amount must be a whole number above 0")
        result.append((recipient, resource, amount))
    return result


def effective(
    slivers: Mapping[str, tuple[Mapping[str, int], Sequence[Loan]]],
) -> dict[str, dict[str, int]]:
    """Return the RSpecs after all loans.

    Only what the authority granted can be lent, and a lender keeps its floor.
    Where 0 means "no limit", a recipient without limit gets nothing: a loan must not limit the
    recipient.

    :param slivers: name -> (complete RSpec as granted, loans in the order given).
    """
    result = {name: dict(granted) for name, (granted, _) in slivers.items()}
    for lender, (granted, loans) in slivers.items():
        left = dict(granted)
        for recipient, resource, amount in loans:
            available = left.get(resource, 0) - FLOORS.get(resource, 0)
            if recipient not in result or not 0 < amount <= available:
                continue  # applied again when the recipient appears or the grant grows
            if resource in UNLIMITED_AT_ZERO and not slivers[recipient][0].get(resource, 0):
                continue
            left[resource] -= amount
            result[lender][resource] -= amount
            result[recipient][resource] = result[recipient].get(resource, 0) + amount
    return result
