"""The bounds of the drill, on records that are made by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fairlanes_transport.drill.figures import (
    Claim,
    Facts,
    Record,
    ahead_bound,
    contended_shares,
    judge,
    peak,
    worst_ahead,
    worst_spread,
)
from fairlanes_transport.drill.show import data, draw, lines

WORKER = 7


def facts(flood: float = 1.0, a: float = 1.0, **more: object) -> Facts:
    """A flood and one quiet tenant, one worker that prefetches two."""
    return dataclasses.replace(Facts("flood", {"flood": flood, "a": a}), **more)  # type: ignore[arg-type]


def served(order: str, sent: str = "") -> Record:
    """What was sent at time 0, and claimed and started in this order, one a second: ``f`` is the flood."""
    record = Record()
    counts = {"f": 0, "a": 0}
    names = {"f": "flood", "a": "a"}
    for letter in sent or order:
        record.sent[names[letter], counts[letter]] = 0.0
        counts[letter] += 1
    counts = {"f": 0, "a": 0}
    for second, letter in enumerate(order, 1):
        tenant, number = names[letter], counts[letter]
        counts[letter] += 1
        record.claims.append(Claim(tenant, number, 1, second, WORKER))
        record.starts[tenant, number] = second
        record.runs += [(second, 1, tenant, WORKER), (second + 0.5, -1, tenant, WORKER)]
    return record


def test_in_turn_the_claims_differ_by_one_turn() -> None:
    assert worst_spread(facts(), served("fafafaf"))[0] == 1
    assert worst_spread(facts(a=3), served("afaaafaa"))[0] == pytest.approx(1 / 2)
    assert judge(facts(), served("fafafaf")).broken == ()


def test_two_of_one_lane_at_once_break_the_bound() -> None:
    spread, pair = worst_spread(facts(), served("ffafafaf"))
    assert (spread, set(pair)) == (2, {"flood", "a"})
    assert judge(facts(), served("ffafafaf")).broken == (
        "share: the claims of flood and a differ by 2 turns; at most 1",
    )


def test_what_follows_when_a_lane_has_run_dry_does_not_count() -> None:
    assert worst_spread(facts(), served("faffffff"))[0] == 1
    assert contended_shares(facts(), served("fafafffffffff")) == {"flood": 0.5, "a": 0.5}


def test_a_lane_with_a_limit_takes_no_part_in_shares() -> None:
    assert worst_spread(facts(limits={"a": 1}), served("ffffffaa"))[0] == 0


def test_the_allowance_grows_with_workers_and_kills() -> None:
    record = served("fafa")
    record.kills.append((2.0, 5))
    assert judge(facts(), record).spread_bound == 3
    assert judge(facts(workers=2), record).spread_bound == 5


@pytest.mark.parametrize(
    ("weight", "position", "bound"),
    [(1.0, 1, 1 + 1 + 4), (1.0, 3, 3 + 1 + 2 + 4), (3.0, 1, 1 + 1 + 4), (0.5, 1, 2 + 1 + 4)],
)
def test_how_many_may_start_ahead(weight: float, position: int, bound: int) -> None:
    assert ahead_bound(facts(a=weight), "a", position) == bound


def test_ahead_counts_what_started_between_sending_and_start() -> None:
    assert worst_ahead(facts(), served("ffffa"), "a") == (4, 6)
    verdict = judge(facts(), served("ffffffffffa"))
    assert verdict.broken[1] == "ahead: 10 tasks started ahead of one of a; at most 6"
    assert judge(facts(ahead=3), served("ffffa")).ahead == {"a": (4, 3)}


def test_what_started_while_a_killed_worker_held_the_task_is_not_ahead_of_it() -> None:
    record = served("ffffffffffa")
    record.claims.insert(1, Claim("a", 0, 1, 1.5, 5))
    record.claims[-1] = Claim("a", 0, 2, 10.5, WORKER)
    record.kills.append((1.6, 5))
    assert worst_ahead(facts(), record, "a")[0] == 1
    assert not [text for text in judge(facts(), record).broken if text.startswith(("ahead", "recovery"))]
    record.claims[-1] = record.claims[-1]._replace(at=100.0)
    assert (
        judge(facts(lease=5.0), record).broken[-1].startswith("recovery: a task of a came back 98.4 s after the kill")
    )


def test_the_peak_of_a_limited_lane() -> None:
    record = Record(runs=[(1, 1, "a", 1), (2, 1, "a", 2), (3, -1, "a", 2), (3, 1, "a", 2), (9, 1, "flood", 1)])
    assert peak(record, "a") == 2
    assert judge(facts(limits={"a": 1}), record).broken == ("limit: 2 tasks of a ran at once; at most 1",)
    record.kills = [(2, 1)]
    assert peak(record, "a") == 1


def test_lost_tasks_and_long_waits_are_told() -> None:
    verdict = judge(facts(max_wait=2.0), served("fafa", sent="fafaa"))
    assert verdict.broken == ("wait: a task of a waited 3.00 s; at most 2", "lost: 1 tasks of a were not started")


def test_what_is_told_of_it() -> None:
    asked, record = facts(limits={"a": 2}), served("faff")
    verdict = judge(asked, record)
    shown = data(asked, record, verdict)
    assert (shown["ok"], shown["spread"], shown["kills"]) == (True, 0.0, 0)
    assert [row["tenant"] for row in shown["tenants"]] == ["flood", "a"]
    assert shown["tenants"][1] | {"peak": 1, "limit": 2, "sent": 1, "wait_max": 1.0} == shown["tenants"][1]
    assert list(lines(record, verdict))[-1] == "Every bound holds."


def test_it_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    record = served("fafaf")
    record.kills.append((2.0, WORKER))
    draw(tmp_path / "drill.png", facts(), record, judge(facts(), record))
    assert (tmp_path / "drill.png").read_bytes().startswith(b"\x89PNG")
