"""What to upload and what to remove, on snapshots (BLD-9 to BLD-12)."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodepool.builder.retention import (
    Rules,
    Snapshot,
    surplus_formats,
    upload_candidates,
    upload_key,
)
from nodepool.zk.mirror.images import ImageData
from nodepool.zk.records import (
    BUILDING,
    DELETING,
    FAILED,
    READY,
    UPLOADING,
    ImageBuild,
    ImageUpload,
)

IMAGE = "image"


def build(
    build_id: str,
    time: float,
    state: str = READY,
    formats: tuple[str, ...] = ("qcow2",),
    image: str = IMAGE,
    builder: str = "ours",
) -> ImageBuild:
    record = ImageBuild(image, build_id)
    record.builder_id = builder
    record.state, record.formats = state, list(formats)
    record.state_time = time
    return record


def upload(
    build_id: str,
    provider: str,
    number: int,
    time: float,
    state: str = READY,
    fmt: str = "qcow2",
    external_id: str | None = "id",
    image: str = IMAGE,
) -> ImageUpload:
    record = ImageUpload(build_id, provider, image, f"{number:010}")
    record.state, record.format, record.external_id = state, fmt, external_id
    record.state_time = time
    return record


def data(builds: list[ImageBuild], uploads: list[ImageUpload], **more: Any) -> ImageData:
    return ImageData(
        names={b.image_name or "" for b in builds}, builds=builds, uploads=uploads, **more
    )


def provider(
    name: str, images: tuple[str, ...] = (IMAGE,), fmt: str = "qcow2", pause: bool = False
) -> Any:
    return SimpleNamespace(
        name=name,
        image_type=fmt,
        diskimages={i: SimpleNamespace(name=i, pause=pause) for i in images},
    )


def rules(known: dict[str, set[str]], images: set[str] | None = None, **more: Any) -> Rules:
    return Rules(
        frozenset({IMAGE} if images is None else images),
        {p: frozenset(i) for p, i in known.items()},
        **more,
    )


def pairs(*arguments: Any) -> list[tuple[str, str, str | None]]:
    return [(*c.pair, c.build.id) for c in upload_candidates(*arguments, "ours")]


# -- uploads


@pytest.mark.spec("BLD-9: providers in file order, images in order; only the newest ready build")
def test_candidates_in_file_order() -> None:
    builds = [build("a1", 1), build("a2", 2), build("a3", 3, FAILED), build("b1", 1, image="other")]
    providers = [provider("z", ("other", IMAGE)), provider("y", (IMAGE,))]
    assert pairs(data(builds, []), providers) == [
        ("other", "z", "b1"),
        (IMAGE, "z", "a2"),
        (IMAGE, "y", "a2"),
    ]


@pytest.mark.spec(
    "BLD-9.1, BLD-9.4, BLD-9.5: not paused, no ready upload there, format among the build's formats"
)
def test_candidates_that_fail_a_condition() -> None:
    builds = [build("a1", 1), build("a2", 2)]
    assert pairs(data(builds, []), [provider("p", pause=True)]) == []
    assert pairs(data(builds, []), [provider("p", fmt="vhd")]) == []
    assert pairs(data(builds, [upload("a2", "p", 1, 3)]), [provider("p"), provider("q")]) == [
        (IMAGE, "q", "a2")
    ]
    assert pairs(data(builds, [upload("a1", "p", 1, 3)]), [provider("p")]) == [(IMAGE, "p", "a2")]
    assert pairs(data(builds, [upload("a2", "p", 1, 3, FAILED)]), [provider("p")]) == [
        (IMAGE, "p", "a2")
    ]
    assert pairs(data(builds, [], upload_locks={(IMAGE, "a2", "p")}), [provider("p")]) == []


@pytest.mark.spec("BLD-9.2: builders that need different formats of an image")
def test_newest_build_in_the_format_of_the_provider_is_a_candidate() -> None:
    builds = [build("a1", 1), build("a2", 2), build("a3", 3, formats=("raw",), builder="other")]
    assert pairs(data(builds, []), [provider("p"), provider("q", fmt="raw")]) == [
        (IMAGE, "p", "a2"),
        (IMAGE, "q", "a3"),
    ]
    assert pairs(data(builds, [upload("a2", "p", 1, 3)]), [provider("p")]) == []
    # Our own newest build lacks the format: a build with it follows.
    builds.append(build("a4", 4, formats=("raw",)))
    assert pairs(data(builds, []), [provider("p")]) == []


# -- removal


def removed(
    snapshot: Snapshot, the_rules: Rules, everything: bool = True
) -> tuple[set[str], set[str], set[str]]:
    """Builds that go, uploads that are deleted, uploads whose records are dropped
    (build/provider/number).
    """
    plans = snapshot.plan(IMAGE, the_rules, everything)

    def short(u: ImageUpload) -> str:
        return f"{u.build_id}/{u.provider_name}/{int(u.id or 0)}"

    return (
        {p.build for p in plans if p.remove},
        {short(u) for p in plans for u in p.delete},
        {short(u) for p in plans for u in p.drop},
    )


@pytest.mark.spec(
    "BLD-11: Two newest ready builds are kept with whatever uploads they have; older ones go"
)
def test_two_newest_ready_builds_are_kept() -> None:
    builds = [build(f"b{n}", n) for n in range(1, 5)]
    uploads = [upload(f"b{n}", "p", 1, n) for n in range(1, 5)]
    assert removed(Snapshot(data(builds, uploads)), rules({"p": {IMAGE}})) == (
        {"b1", "b2"},
        {"b1/p/1", "b2/p/1"},
        set(),
    )


@pytest.mark.spec(
    "BLD-11: a provider whose uploads of new builds keep failing does not lose its working images"
)
def test_working_images_stay() -> None:
    builds = [build(f"b{n}", n) for n in range(1, 6)]
    uploads = [upload(f"b{n}", "good", 1, n) for n in range(1, 6)]
    uploads += [upload("b1", "bad", 1, 1), upload("b2", "bad", 1, 2)]
    uploads += [upload(f"b{n}", "bad", 1, n, FAILED, external_id=None) for n in (3, 4, 5)]
    gone, deleted, dropped = removed(
        Snapshot(data(builds, uploads)), rules({"good": {IMAGE}, "bad": {IMAGE}})
    )
    assert gone == {"b3"}
    assert deleted == {"b1/good/1", "b2/good/1", "b3/good/1", "b3/bad/1", "b4/bad/1", "b5/bad/1"}
    assert dropped == set()


@pytest.mark.spec(
    "BLD-11: older builds stay while an upload belongs to a provider this builder does not know"
)
def test_uploads_of_unknown_providers() -> None:
    builds = [build(f"b{n}", n) for n in range(1, 5)]
    uploads = [upload("b1", "theirs", 1, 1), upload("b1", "p", 1, 1)]
    assert removed(Snapshot(data(builds, uploads)), rules({"p": {IMAGE}})) == ({"b2"}, set(), set())
    uploads[0].state = DELETING
    assert removed(Snapshot(data(builds, [uploads[0]])), rules({"p": {IMAGE}}))[0] == {"b1", "b2"}


@pytest.mark.spec(
    "BLD-10.B.2.a: no longer in the provider's diskimages: all its uploads go, those of others stay"
)
def test_image_dropped_from_a_provider() -> None:
    builds = [build("b1", 1), build("b2", 2)]
    uploads = [upload(b, p, 1, 1) for b in ("b1", "b2") for p in ("p", "q")]
    assert removed(Snapshot(data(builds, uploads)), rules({"p": {IMAGE}, "q": set()})) == (
        set(),
        {"b1/q/1", "b2/q/1"},
        set(),
    )


@pytest.mark.spec("BLD-10.B.1: keep set empty if the image is not in this builder's configuration")
def test_image_removed_everywhere() -> None:
    builds = [build("b1", 1), build("b2", 2)]
    snapshot = Snapshot(data(builds, [upload("b2", "p", 1, 2)]))
    assert removed(snapshot, rules({"p": set()}, set())) == ({"b1", "b2"}, {"b2/p/1"}, set())


@pytest.mark.spec(
    "BLD-10.B.2.a: abandoned uploads of kept builds are dropped; failed ones deleted; running ones "
    "left"
)
def test_tidying_of_kept_builds() -> None:
    builds = [build("b1", 1)]
    uploads = [
        upload("b1", "p", 1, 1),
        upload("b1", "p", 2, 2, UPLOADING),
        upload("b1", "p", 3, 2, FAILED),
        upload("b1", "p", 4, 2, DELETING),
    ]
    the_rules = rules({"p": {IMAGE}})
    assert removed(Snapshot(data(builds, uploads)), the_rules) == (
        set(),
        {"b1/p/3", "b1/p/4"},
        {"b1/p/2"},
    )
    assert removed(Snapshot(data(builds, uploads)), the_rules, everything=False) == (
        set(),
        {"b1/p/4"},
        set(),
    )
    busy = Snapshot(data(builds, uploads, upload_locks={(IMAGE, "b1", "p")}))
    assert removed(busy, the_rules) == (set(), {"b1/p/3", "b1/p/4"}, set())
    ours = rules({"p": {IMAGE}}, running_uploads={(IMAGE, "b1", "p")})
    assert removed(Snapshot(data(builds, uploads)), ours)[2] == set()


@pytest.mark.spec(
    "BLD-11: Failed and abandoned builds disappear on the next pass; one in progress stays"
)
def test_failed_and_abandoned_builds() -> None:
    builds = [
        build("b1", 1),
        build("b2", 2, FAILED),
        build("b3", 3, BUILDING),
        build("b4", 4, DELETING),
    ]
    assert removed(Snapshot(data(builds, [])), rules({}))[0] == {"b2", "b3", "b4"}
    assert removed(Snapshot(data(builds, [])), rules({}), everything=False)[0] == {"b4"}
    assert removed(Snapshot(data(builds, [], build_locks={IMAGE: (0.0, True)})), rules({}))[0] == {
        "b2",
        "b4",
    }
    assert removed(Snapshot(data(builds, [])), rules({}, running_builds={(IMAGE, "b3")}))[0] == {
        "b2",
        "b4",
    }


@pytest.mark.spec(
    "BLD-4: a record with no data must be treated as absent and be removed by cleanup"
)
def test_empty_records_are_removed_in_full_passes() -> None:
    snapshot = Snapshot(
        data(
            [build("b1", 1)], [upload("e1", "p", 1, 5)], empty_builds={(IMAGE, "e1"), (IMAGE, "e2")}
        )
    )
    assert removed(snapshot, rules({"p": {IMAGE}})) == ({"e1", "e2"}, {"e1/p/1"}, set())
    assert removed(snapshot, rules({"p": {IMAGE}}), everything=False) == (set(), set(), set())


def test_equal_times_are_decided() -> None:
    builds = [build(f"b{n}", 7) for n in range(4)]
    results = {
        tuple(sorted(removed(Snapshot(data(list(order), [])), rules({}))[0]))
        for order in itertools.permutations(builds)
    }
    assert len(results) == 1 and len(results.pop()) == 2


PROVIDERS = ("p", "q", "unknown")
BUILDS = tuple(f"b{n}" for n in range(6))
times = st.integers(0, 20).map(float)


@st.composite
def snapshots(draw: Any) -> tuple[ImageData, Rules]:
    builds = [
        build(
            b, draw(times), draw(st.sampled_from([READY, READY, READY, BUILDING, FAILED, DELETING]))
        )
        for b in BUILDS[: draw(st.integers(0, 6))]
    ]
    uploads = [
        upload(
            b.id or "",
            p,
            n,
            draw(times),
            state := draw(st.sampled_from([READY, READY, UPLOADING, FAILED, DELETING])),
            external_id="x" if state in (READY, DELETING) else None,
        )
        for b in builds
        for p in PROVIDERS
        for n in range(draw(st.integers(0, 2)))
    ]
    locks = {(IMAGE, b.id or "", p) for b in builds for p in PROVIDERS if draw(st.booleans())}
    known = {p: {IMAGE} if draw(st.integers(0, 3)) else set() for p in ("p", "q")}
    images = {IMAGE} if draw(st.integers(0, 3)) else set()
    found = data(
        builds, uploads, upload_locks=locks, build_locks={IMAGE: (0.0, draw(st.booleans()))}
    )
    return found, rules(known, images)


@given(snapshots(), st.booleans())
@pytest.mark.spec("BLD-10, BLD-11: what a pass may and may not remove, for any records")
def test_what_a_pass_never_removes(case: tuple[ImageData, Rules], everything: bool) -> None:
    found, the_rules = case
    snapshot = Snapshot(found)
    plans = {p.build: p for p in snapshot.plan(IMAGE, the_rules, everything)}
    touched = {upload_key(u) for p in plans.values() for u in [*p.delete, *p.drop]}
    builds = {b.id: b for b in found.builds}
    ready = sorted(
        (b for b in found.builds if b.state == READY),
        key=lambda b: (b.state_time, b.id),
        reverse=True,
    )
    configured = IMAGE in the_rules.images
    # The two newest ready builds of a configured image stay.
    if configured:
        assert not any(plans[b.id or ""].remove for b in ready[:2] if b.id in plans)
    for name in the_rules.known:
        if IMAGE not in the_rules.known[name]:
            continue
        good = sorted(
            (
                u
                for u in found.uploads
                if u.provider_name == name
                and u.state == READY
                and builds[u.build_id].state == READY
            ),
            key=lambda u: u.state_time or 0,
            reverse=True,
        )
        # A provider that shall have the image never loses its last two working ones.
        survivors = [u for u in good if upload_key(u) not in touched]
        assert len(survivors) >= min(2, len(good))
    for u in found.uploads:
        if u.provider_name not in the_rules.known:
            assert upload_key(u) not in touched
        if u.state == UPLOADING and (IMAGE, u.build_id, u.provider_name) in found.upload_locks:
            assert upload_key(u) not in touched
    for p in plans.values():
        left = [u for u in snapshot.uploads[(IMAGE, p.build)] if upload_key(u) not in touched]
        if p.remove:
            assert all(u.state == DELETING for u in left)
            if p.state == BUILDING:
                assert not found.build_locks[IMAGE][1]
        # Only records without anything in the cloud are dropped.
        assert all(u.state == UPLOADING and u.external_id is None for u in p.drop)


@given(snapshots())
@pytest.mark.spec("BLD-10: repeated passes come to an end")
def test_passes_come_to_rest(case: tuple[ImageData, Rules]) -> None:
    found, the_rules = case
    found.upload_locks = set()
    found.build_locks = {}
    for _round in range(4):
        plans = Snapshot(found).plan(IMAGE, the_rules)
        if not plans:
            break
        gone = {upload_key(u) for p in plans for u in [*p.delete, *p.drop]}
        found.uploads = [u for u in found.uploads if upload_key(u) not in gone]
        left = {u.build_id for u in found.uploads}
        found.builds = [
            b
            for b in found.builds
            if not any(p.build == b.id and p.remove for p in plans) or b.id in left
        ]
        # What other builders know is deleted by them.
        found.uploads = [
            u for u in found.uploads if u.state != DELETING or u.provider_name in the_rules.known
        ]
    else:
        raise AssertionError("there is always something left to do")


# -- files


def image(delete: bool = True, keep: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(delete_after_upload=delete, keep_image_types=set(keep))


@pytest.mark.spec(
    "BLD-12: keep-formats and formats of providers without a ready upload stay; only what was "
    "uploaded goes"
)
def test_surplus_formats_are_uploaded_ones_that_nobody_needs() -> None:
    record = build("b1", 1, formats=("qcow2", "raw", "vhd"))
    providers = [
        provider("q", fmt="qcow2"),
        provider("r", fmt="raw"),
        provider("v", fmt="vhd"),
        provider("x", ("other",), "vhd"),
    ]
    done = [
        upload("b1", "q", 1, 1),
        upload("b1", "r", 1, 1, fmt="raw"),
        upload("b1", "v", 1, 1, FAILED, fmt="vhd"),
    ]
    assert surplus_formats(record, done, image(keep=("qcow2",)), providers) == {"raw"}
    assert surplus_formats(record, done[:1], image(), providers) == {"qcow2"}
    assert surplus_formats(record, done, image(delete=False), providers) == set()
    assert surplus_formats(record, done, None, providers) == set()
    assert surplus_formats(record, [], image(), []) == set()
    record.state = BUILDING
    assert surplus_formats(record, done, image(), providers) == set()
    second = [*providers, provider("r2", fmt="raw")]
    record.state = READY
    assert surplus_formats(record, done, image(), second) == {"qcow2"}
