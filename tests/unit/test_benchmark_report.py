"""How the benchmarks put their figures together."""

from __future__ import annotations

from tests.benchmarks.report import Benchmark, Figure, Report

RATE = Benchmark(
    "bench",
    {"rate": Figure("per second", ratio_at_least=2.0), "pops": Figure("per message", at_most=4.1)},
    lambda rig, schemes: {},
)


def report(*rounds: tuple[float, float]) -> Report:
    """Rates of ours and of the baseline, one pair per round."""
    made = Report({"cpus": 2})
    for ours, base in rounds:
        made.add(RATE, {"fairlanes": {"rate": ours, "pops": 4.0, "of these BLPOP": 1.0}, "redis": {"rate": base}})
    return made


def test_medians_of_the_rounds_and_of_their_ratios() -> None:
    rate, pops, detail = report((300, 100), (100, 10), (500, 100)).rows()
    assert (rate["fairlanes"], rate["redis"], rate["ratio"], rate["met"]) == (300, 100, 5, True)
    assert (pops["fairlanes"], pops["redis"], pops["ratio"], pops["target"]) == (4, None, None, "<= 4.1")
    assert (detail["figure"], detail["detail"]) == ("of these BLPOP", True)


def test_a_missed_target_is_told() -> None:
    made = report((150, 100))
    assert made.missed() == ["bench, rate: 150 per second, ratio 1.5; wanted ratio >= 2"]
    assert "**missed**" in made.table()
    assert "BLPOP" not in made.table()
    assert made.data()["about"] == {"cpus": 2}
