"""survey: a page of the lanes that hold messages; nothing is changed."""

from __future__ import annotations

from typing import Any

from tests.scripts.bench import T0, Bench


def survey(bench: Bench, after: bytes = b"", limit: int = 10) -> tuple[bytes, list[list[Any]]]:
    """(Where the page ended, lanes); asserts that looking changes nothing."""
    bench.mark()
    now, end, lanes = bench.store.survey("q", after, limit)
    assert (now, bench.changes()) == (bench.now, {})
    return end, lanes


def test_an_empty_queue(bench: Bench) -> None:
    assert survey(bench) == (b"", [])


def test_what_is_said_of_a_lane(bench: Bench) -> None:
    bench.store.declare("q", weight=2)
    bench.fill("a", 3)
    bench.tick(500)
    bench.fill("b", 1)
    bench.store.configure("q", "b", weight=0.5, paused=True)
    born = str(T0).encode()
    later = str(T0 + 500).encode()
    assert survey(bench) == (b"", [[b"a", 3, b"2", 0, born, b""], [b"b", 1, b"0.5", 1, later, b""]])


def test_the_next_message_says_its_eta(bench: Bench) -> None:
    envelope = '{"headers": {"eta": "2023-11-14T22:13:30+00:00"}}'
    bench.store.enqueue("q", "t", "a", envelope, b"")
    assert survey(bench)[1][0][4:] == [str(T0).encode(), b"2023-11-14T22:13:30+00:00"]


def test_pages_name_each_lane_once(bench: Bench) -> None:
    for i in range(7):
        bench.fill(f"lane {i}", 1)
    seen, after, pages = [], b"", 0
    while pages == 0 or after:
        after, lanes = survey(bench, after, 3)
        seen += [lane[0] for lane in lanes]
        pages += 1
    assert (seen, pages) == ([b"lane %d" % i for i in range(7)], 3)


def test_a_lane_with_nothing_ready_takes_a_place_and_is_left_out(bench: Bench) -> None:
    bench.fill("a", 1)
    bench.fill("b", 1)
    assert bench.lanes() == ["a"]
    assert survey(bench, limit=1) == (b"a", [])
    assert [lane[0] for lane in survey(bench, b"a", 1)[1]] == [b"b"]
