"""messages: where messages are, all at one moment; nothing is changed."""

from __future__ import annotations

from tests.scripts.bench import T0, Bench
from tests.scripts.test_redrive import bury


def test_each_place(bench: Bench) -> None:
    bury(bench, "dead")
    bench.put("leased")
    bench.claim()
    bench.put("ready")
    bench.put("late", delay=500)
    bench.mark()
    seen = bench.store.messages("q", [(tag, "x") for tag in ("ready", "leased", "late", "dead", "nobody")])
    assert bench.changes() == {}
    assert [bool(one[0]) for one in seen] == [True, True, True, True, False]
    at = str(T0).encode()
    assert [one[1:8] for one in seen] == [
        [b"3", b"", b"", b"", b"", 0, 0],
        [b"", b"", str(T0 + 10_000).encode(), b"", b"", 1, 0],
        [b"", b"", b"", str(T0 + 500).encode(), b"", 0, 0],
        [b"", b"", b"", b"", at, 0, 0],
        [b"", b"", b"", b"", b"", 0, 0],
    ]
    assert [one[8:] for one in seen] == [[1, 1]] * 4 + [[0, 0]]


def test_the_lane_in_which_it_was_found_counts_too(bench: Bench) -> None:
    bench.put("t", "a")
    bench.client.zadd(bench.key("ready", "b"), {"t": 7})
    bench.client.sadd(bench.key("flight", "b"), "t")
    assert bench.store.messages("q", [("t", "b")])[0][1:3] == [b"1", b"7"]
    assert bench.store.messages("q", [("t", "b")])[0][6:8] == [0, 1]
    assert bench.store.messages("q", []) == []
