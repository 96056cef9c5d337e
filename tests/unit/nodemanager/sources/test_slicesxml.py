"""Reading slices.xml."""

from __future__ import annotations

import itertools

import pytest

from nodepool.nodemanager.records.records import RecordError, parse_record
from nodepool.nodemanager.records.rspec import UNLIMITED_RATE
from nodepool.nodemanager.sources import slices_xml
from tests.support.nodemanager.node import KEY

KEY2 = KEY.replace("JJ", "JK").replace("IJb4", "IKc5")
HEAD = '<slice id="5" name="princeton_sirius" expiry="2000000000">'
PARTS = (
    '<timestamp value="77"/>',
    '<node id="12"/>',
    '<user person_id="1"/>',
    '<resource name="nm_cpu_share"><value>40</value></resource>',
)
KEYS = f'<key person_id="1" value="{KEY}"/>'


def one(text: str, node: int | str = 12) -> dict[str, object]:
    (record,) = slices_xml.parse(text.encode(), node)
    return record


@pytest.mark.spec(
    "NM-A.10: slice, timestamp, node, user, resource, value, key; A.6: delegations of del_snoop"
)
def test_all_elements_of_a_slice_are_read() -> None:
    assert one(f"<slices>{HEAD}{''.join(PARTS)}</slice>{KEYS}</slices>") == {
        "account_type": "sliver",
        "name": "princeton_sirius",
        "id": 5,
        "expiry": 2000000000,
        "timestamp": 77,
        "rspec": {"nm_cpu_share": 40},
        "ssh_keys": KEY,
        "delegations": [["del_snoop", "GetRSpec"]],
        "plc_instantiated": True,
    }


@pytest.mark.spec("NM-A.10: order of elements must not matter")
@pytest.mark.parametrize("parts", list(itertools.permutations(PARTS)))
def test_order_of_elements_does_not_matter(parts: tuple[str, ...]) -> None:
    body = f"{HEAD}{''.join(parts)}</slice>"
    assert (
        one(f"<slices>{body}{KEYS}</slices>")
        == one(f"<slices>{KEYS}{body}</slices>")
        == one(f"<slices>{HEAD}{''.join(PARTS)}</slice>{KEYS}</slices>")
    )


@pytest.mark.spec("NM-A.10: a slice opens the current slice; what follows belongs to it")
def test_elements_after_a_slice_belong_to_it() -> None:
    text = (
        '<slices><slice id="1" name="a"/><node id="12"/><resource '
        'name="nm_net_share"/><value>3</value>'
        '<slice id="2" name="b"/><node id="13"/></slices>'
    )
    assert one(text)["rspec"] == {"nm_net_share": 3}
    assert one(text, 13)["name"] == "b"


@pytest.mark.spec("NM-A.10: kept only if it equals our own node id")
def test_other_nodes() -> None:
    assert (
        slices_xml.parse(
            b'<slices><slice id="1" name="a"><node id="1"/><node id="2"/></slice></slices>', 12
        )
        == []
    )
    assert slices_xml.parse(b"<slices/>", 12) == []


@pytest.mark.spec("NM-A.10: a person may be in several slices; keys of all members in order")
def test_person_in_two_slices() -> None:
    member = '<node id="12"/><user person_id="2"/><user person_id="1"/>'
    text = (
        f'<slices><slice id="1" name="a">{member}</slice><slice id="2" name="b">{member}</slice>'
        f'<key person_id="1" value="{KEY}"/><key person_id="2" value="{KEY2}"/><key person_id="2" '
        f'value="{KEY}"/></slices>'
    )
    assert [r["ssh_keys"] for r in slices_xml.parse(text.encode(), 12)] == [f"{KEY2}\n{KEY}"] * 2


@pytest.mark.spec(
    "NM-A.10: text of a value in several chunks; non-integers ignored; unknown elements skipped"
)
def test_values_in_chunks_are_joined_and_unknown_elements_skipped() -> None:
    text = (
        f'<x:slices xmlns:x="urn:x">{HEAD}<node id="12"/><junk><deep/></junk><resource '
        'name="nm_cpu_share"><value>1<!-- -->2'
        "<![CDATA[3]]></value></resource><resource "
        'name="nm_net_share"><value>much</value></resource>'
        '<resource name="nobody_knows"><value>1</value></resource><resource '
        'name="cpu_cores"><value>1</value></resource>'
        "<value>9</value></slice></x:slices>"
    )
    assert one(text)["rspec"] == {"nm_cpu_share": 123, "cpu_cores": 1}


def test_a_bad_key_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    bad = '<key person_id="1" value="command=&quot;x&quot; ssh-rsa AAAA"/>'
    text = f"<slices>{HEAD}{''.join(PARTS)}</slice>{bad}{KEYS}</slices>"
    assert one(text)["ssh_keys"] == KEY
    assert "person 1" in caplog.text


@pytest.mark.spec("NM issue: broken slices.xml, entity bombs")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "text",
        "<slices>",
        '<slices><slice id="1"',
        "<html><body>Please log in</body></html>",
        '<!DOCTYPE s [<!ENTITY a "x"><!ENTITY b "&a;&a;">]><slices>&b;</slices>',
        '<!DOCTYPE s [<!ENTITY a SYSTEM "file:///etc/passwd">]><slices>&a;</slices>',
    ],
)
def test_broken_documents_and_entity_bombs_are_refused(text: str) -> None:
    with pytest.raises(slices_xml.SlicesXmlError, match=r"slices\.xml"):
        slices_xml.parse(text.encode(), 12)


def test_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices_xml, "MAX_SIZE", 10)
    with pytest.raises(slices_xml.SlicesXmlError, match="more than 10 bytes"):
        slices_xml.parse(b"<slices></slices>", 12)


def test_thousands_of_slices_are_parsed() -> None:
    body = "".join(
        f'<slice id="{n}" name="s{n}"><node id="12"/><user person_id="{n}"/></slice><key '
        f'person_id="{n}" value="{KEY}"/>'
        for n in range(3000)
    )
    found = slices_xml.parse(f"<planetlab><slices>{body}</slices></planetlab>".encode(), 12)
    assert len(found) == 3000
    assert all(record["ssh_keys"] == KEY for record in found)


DEFAULTS = '<slice id="9" name="pl_default">{node}{resources}</slice>'
HERE = '<node id="12"/>'


def resource(name: str, amount: int) -> str:
    return f'<resource name="{name}"><value>{amount}</value></resource>'


def granted(defaults: str, own: str, **options: str | None) -> dict[str, int]:
    """RSpec of a slice alongside the default slice, which makes no sliver and may come before or
    after.
    """
    parts = [f'<slice id="1" name="a">{HERE}{own}</slice>', defaults]
    results = [
        slices_xml.parse(f"<slices>{''.join(order)}</slices>".encode(), 12, **options)  # type: ignore[arg-type]
        for order in (parts, parts[::-1])
    ]
    assert results[0] == results[1]
    (record,) = results[0]
    assert record["name"] == "a"
    found: dict[str, int] = parse_record(record)["rspec"]
    return found


@pytest.mark.spec("NM-B.2: a slice named <prefix>_default overrides host-wide defaults")
def test_default_slice() -> None:
    both = resource("nm_cpu_share", 7) + resource("cpu_pct", 5)
    for node in (HERE, ""):
        assert granted(DEFAULTS.format(node=node, resources=both), "") == {
            "nm_cpu_share": 7,
            "nm_cpu_guaranteed_share": 50,
        }
        # The slice's own win, by whatever name.
        assert granted(DEFAULTS.format(node=node, resources=both), resource("cpu_share", 3)) == {
            "nm_cpu_share": 3,
            "nm_cpu_guaranteed_share": 50,
        }
    other = DEFAULTS.format(node='<node id="13"/>', resources=both)
    assert granted(other, resource("cpu_share", 3)) == {"nm_cpu_share": 3}
    old = '<slice id="9" name="pl_default" expiry="1000">' + both + "</slice>"
    assert granted(old, "") == {}


@pytest.mark.spec("NM-B.4: net_max_rate = -1 in the default slice turns shaping off")
def test_default_slice_turns_shaping_off() -> None:
    assert granted(DEFAULTS.format(node="", resources=resource("net_max_rate", -1)), "") == {
        "nm_net_max_rate": UNLIMITED_RATE
    }
    # A guarantee never refuses a slice with a low ceiling, nor the other way round.
    rate = DEFAULTS.format(node="", resources=resource("nm_net_min_rate", 5000))
    assert granted(rate, resource("nm_net_max_rate", 1000)) == {
        "nm_net_min_rate": 1000,
        "nm_net_max_rate": 1000,
    }
    ceiling = DEFAULTS.format(node="", resources=resource("nm_net_max_rate", 1000))
    assert granted(ceiling, resource("nm_net_min_rate", 5000)) == {
        "nm_net_min_rate": 1000,
        "nm_net_max_rate": 1000,
    }


def test_default_slice_with_a_mistake(caplog: pytest.LogCaptureFixture) -> None:
    wrong = DEFAULTS.format(
        node="", resources=resource("nm_cpu_share", 0) + resource("nm_pids_max", 99)
    )
    assert granted(wrong, "") == {"nm_pids_max": 99}
    assert "ignoring an attribute of slice pl_default: nm_cpu_share" in caplog.text
    # A slice's own mistake is reported as its own, not hidden by defaults.
    with pytest.raises(RecordError, match="nm_cpu_share"):
        granted(
            DEFAULTS.format(node="", resources=resource("nm_pids_max", 99)),
            resource("nm_cpu_share", 0),
        )


def test_other_default_slice() -> None:
    text = (
        '<slices><slice id="1" '
        f'name="vini_default">{HERE}{resource("nm_pids_max", 99)}</slice></slices>'
    )
    assert len(slices_xml.parse(text.encode(), 12)) == 1, "a slice like any other"
    assert slices_xml.parse(text.encode(), 12, default_slice="vini_default") == []
    text = text.replace("vini", "pl")
    assert len(slices_xml.parse(text.encode(), 12, default_slice=None)) == 1
