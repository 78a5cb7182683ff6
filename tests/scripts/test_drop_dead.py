"""drop_dead: dead letters are gone for good."""

from __future__ import annotations

from tests.scripts.bench import Bench
from tests.scripts.test_redrive import bury


def test_the_whole_state(bench: Bench) -> None:
    bury(bench, "t")
    bench.mark()
    assert bench.store.drop_dead("q", ["t"]) == 1
    assert bench.changes() == {
        "body/t": None, "dead/t": None, "envelope/t": None, "message/t": None, "reasons/t": None,
        "totals/purged": 1,
    }  # fmt: skip


def test_what_is_not_dead_is_passed_over(bench: Bench) -> None:
    bench.put("ready")
    bench.mark()
    assert bench.store.drop_dead("q", ["ready", "nobody"]) == 0
    assert bench.store.drop_dead("q", []) == 0
    assert bench.changes() == {}
