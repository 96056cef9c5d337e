"""Loans: the list, and what follows from it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodepool.nodemanager.records import loans, rspec

NAMES = ("a", "b", "c", "d")
RESOURCES = (
    "nm_cpu_share",
    "nm_cpu_guaranteed_share",
    "nm_mem_limit",
    "nm_pids_max",
    "nm_net_max_rate",
)
one_loan = st.tuples(
    st.sampled_from((*NAMES, "elsewhere")), st.sampled_from(RESOURCES), st.integers(1, 400)
)
grants = st.fixed_dictionaries({name: st.integers(0, 500) for name in RESOURCES})
hosts = st.dictionaries(
    st.sampled_from(NAMES), st.tuples(grants, st.lists(one_loan, max_size=6)), min_size=1
)


@pytest.mark.spec("NM-A.7: the sum over slivers of each resource is unchanged by any set of loans")
@given(hosts)
def test_sum_is_conserved(host: dict[str, Any]) -> None:
    result = loans.effective(host)
    for resource in RESOURCES:
        assert sum(r[resource] for r in result.values()) == sum(
            g[resource] for g, _ in host.values()
        )


@pytest.mark.spec("NM-A.7, NM-B.2: never negative, never below the lender's floor")
@given(hosts)
def test_loans_never_go_below_the_lenders_floor(host: dict[str, Any]) -> None:
    for name, result in loans.effective(host).items():
        for resource in RESOURCES:
            assert result[resource] >= min(host[name][0][resource], rspec.FLOORS[resource])


@pytest.mark.spec("NM-A.7: the result does not depend on record order")
@given(hosts, st.randoms(use_true_random=False))
def test_loans_do_not_depend_on_record_order(host: dict[str, Any], random: Any) -> None:
    names = list(host)
    random.shuffle(names)
    assert loans.effective({name: host[name] for name in names}) == loans.effective(host)


@pytest.mark.spec("NM-A.7: only resources received from the authority can be lent (no relending)")
@given(hosts)
def test_borrowed_resources_cannot_be_lent(host: dict[str, Any]) -> None:
    """A sliver gives away no more than its own grant, however much it borrows."""
    alone = {
        n: loans.effective({m: (g, made if m == n else []) for m, (g, made) in host.items()})[n]
        for n in host
    }
    together = loans.effective(host)
    for name in host:
        for resource in RESOURCES:
            assert together[name][resource] >= alone[name][resource]


def test_borrowed_is_not_lent() -> None:
    host = {
        "a": ({"nm_cpu_share": 10}, [("b", "nm_cpu_share", 9)]),
        "b": ({"nm_cpu_share": 1}, [("c", "nm_cpu_share", 5)]),
        "c": ({"nm_cpu_share": 1}, []),
    }
    assert {n: r["nm_cpu_share"] for n, r in loans.effective(host).items()} == {
        "a": 1,
        "b": 10,
        "c": 1,
    }


@pytest.mark.spec("NM-A.7: README example, 200 per mille guaranteed CPU")
def test_loan_of_the_readme_moves_guaranteed_cpu() -> None:
    host = {
        "princeton_sirius": (
            rspec.with_defaults({"nm_cpu_guaranteed_share": 400}),
            loans.validate(["princeton_eisentest", "nm_cpu_guaranteed_share", 200]),
        ),
        "princeton_eisentest": (rspec.with_defaults({}), []),
    }
    result = loans.effective(host)
    assert [r["nm_cpu_guaranteed_share"] for r in result.values()] == [200, 200]


@pytest.mark.spec(
    "NM-A.7: an over-committed triple is skipped and in force again when the grant grows"
)
def test_over_committed_loan_is_skipped_until_the_grant_grows() -> None:
    made = [("b", "nm_cpu_share", 50), ("b", "nm_cpu_share", 5)]

    def result(grant: int) -> int:
        return loans.effective(
            {"a": ({"nm_cpu_share": grant}, made), "b": ({"nm_cpu_share": 1}, [])}
        )["b"]["nm_cpu_share"]

    assert (result(32), result(51), result(56)) == (6, 51, 56)


@pytest.mark.spec(
    "NM-A.7: when the recipient disappears the loan vanishes; one to oneself changes nothing"
)
def test_deleted_groups_and_the_group_itself_are_skipped() -> None:
    assert (
        loans.effective({"a": ({"nm_cpu_share": 9}, [("b", "nm_cpu_share", 3)])})["a"][
            "nm_cpu_share"
        ]
        == 9
    )
    assert (
        loans.effective({"a": ({"nm_cpu_share": 9}, [("a", "nm_cpu_share", 3)])})["a"][
            "nm_cpu_share"
        ]
        == 9
    )


@pytest.mark.spec("NM-C.3: 0 is no limit for memory and cap: no loan sets or lifts a limit")
@pytest.mark.parametrize("resource", ["nm_mem_limit", "nm_cpu_limit"])
def test_a_gift_is_no_weapon(resource: str) -> None:
    host = {
        "evil": ({resource: 500}, [("victim", resource, 1), ("friend", resource, 499)]),
        "victim": ({resource: 0}, []),
        "friend": ({resource: 100}, []),
    }
    result = loans.effective(host)
    assert result["victim"][resource] == 0
    assert result["evil"][resource] >= rspec.FLOORS[resource] > 0


@pytest.mark.spec("NM-A.7: accept a bare triple as a list of one; list or tuple")
def test_single_loan_may_be_given_without_a_list() -> None:
    assert (
        loans.validate(["b", "nm_cpu_share", 1])
        == loans.validate([("b", "nm_cpu_share", 1)])
        == [("b", "nm_cpu_share", 1)]
    )
    assert loans.validate([]) == []


@pytest.mark.spec("NM-A.7: anything malformed is refused as a whole")
@pytest.mark.parametrize(
    "wrong",
    [
        None,
        "text",
        5,
        {},
        [1],
        [["b", "nm_cpu_share"]],
        [["b", "nm_cpu_share", 1, 2]],
        [[1, "nm_cpu_share", 1]],
        [["b", "nm_disk_quota", 1]],
        [["b", 7, 1]],
        [["b", "nm_cpu_share", 0]],
        [["b", "nm_cpu_share", -1]],
        [["b", "nm_cpu_share", True]],
        [["b", "nm_cpu_share", 1.0]],
        [["b", "nm_cpu_share", "1"]],
        [["b", "nm_cpu_share", 2**70]],
        [["b", "nm_cpu_share", 1], "x"],
        [["b", "nm_cpu_share", 1]] * 2000,
    ],
)
def test_malformed_loans_are_refused_as_a_whole(wrong: Any) -> None:
    with pytest.raises(loans.LoanError, match="loan"):
        loans.validate(wrong)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda c: st.lists(c, max_size=4),
        max_leaves=8,
    )
)
def test_arbitrary_loans_are_validated_or_refused(value: Any) -> None:
    try:
        for recipient, resource, amount in loans.validate(value):
            assert isinstance(recipient, str)
            assert resource in rspec.LOANABLE
            assert amount > 0
    except loans.LoanError:
        pass
