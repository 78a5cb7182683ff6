"""What a benchmark measures, and how its figures are put together: medians, ratios, a table, JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tests.benchmarks.rig import BASELINE, OURS, Rig

#: Scheme -> figure -> value of one round; a value may be missing where a scheme has no such thing.
Values = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Figure:
    """One figure of a benchmark.

    Attributes:
        at_least, at_most: the target, of the value on `OURS`.
        ratio_at_least, ratio_at_most: the target, of the ratio to `BASELINE`.
    """

    unit: str
    at_least: float | None = None
    at_most: float | None = None
    ratio_at_least: float | None = None
    ratio_at_most: float | None = None

    def target(self) -> str:
        """The target in words; empty if there is none."""
        words = (
            (self.at_least, ">= {}"),
            (self.at_most, "<= {}"),
            (self.ratio_at_least, "ratio >= {}"),
            (self.ratio_at_most, "ratio <= {}"),
        )
        return ", ".join(text.format(_short(value)) for value, text in words if value is not None)

    def met(self, value: float | None, ratio: float | None) -> bool:
        """Whether the targets are met; what was not measured misses none."""
        return (
            _within(value, self.at_least, self.at_most)
            and _within(ratio, self.ratio_at_least, self.ratio_at_most)
        )  # fmt: skip


def _within(value: float | None, least: float | None, most: float | None) -> bool:
    if value is None:
        return True
    return (least is None or value >= least) and (most is None or value <= most)


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: `run` measures one round on each scheme, in that order."""

    name: str
    figures: Mapping[str, Figure]
    run: Callable[[Rig, Sequence[str]], Values]


def each(measure: Callable[[Rig, str], Mapping[str, float]]) -> Callable[[Rig, Sequence[str]], Values]:
    """Make a `Benchmark.run` of a function that measures one scheme."""

    def run(rig: Rig, schemes: Sequence[str]) -> Values:
        return {scheme: measure(rig, scheme) for scheme in schemes}

    return run


@dataclass
class Report:
    """The figures of a run."""

    about: Mapping[str, Any]
    rounds: dict[str, list[Values]] = field(default_factory=dict)
    benchmarks: dict[str, Benchmark] = field(default_factory=dict)

    def add(self, benchmark: Benchmark, values: Values) -> None:
        """Add a round.  Figures that the benchmark does not name are kept as details, in the JSON alone."""
        self.benchmarks[benchmark.name] = benchmark
        self.rounds.setdefault(benchmark.name, []).append(values)

    def rows(self) -> list[dict[str, Any]]:
        """One row per figure, in the order of the benchmarks."""
        rows: list[dict[str, Any]] = []
        for name, benchmark in self.benchmarks.items():
            measured = self.rounds[name]
            known = {figure: None for values in measured for scheme in values.values() for figure in scheme}
            rows += [self._row(name, figure, benchmark.figures.get(figure), measured) for figure in known]
        return rows

    def _row(self, name: str, title: str, figure: Figure | None, measured: list[Values]) -> dict[str, Any]:
        ours = [values[OURS][title] for values in measured if title in values.get(OURS, {})]
        base = [values[BASELINE][title] for values in measured if title in values.get(BASELINE, {})]
        ratios = [mine / other for mine, other in zip(ours, base, strict=False) if other]
        value, ratio = (median(values) if values else None for values in (ours, ratios))
        return {
            "benchmark": name,
            "figure": title,
            "unit": figure.unit if figure else "",
            OURS: value,
            BASELINE: median(base) if base else None,
            "ratio": ratio,
            "target": figure.target() if figure else "",
            "met": figure.met(value, ratio) if figure else True,
            "detail": figure is None,
            "rounds": {OURS: ours, BASELINE: base},
        }

    def missed(self) -> list[str]:
        """The figures that miss their targets, in words."""
        return [
            f"{row['benchmark']}, {row['figure']}: {_short(row[OURS])} {row['unit']}, "
            f"ratio {_short(row['ratio'])}; wanted {row['target']}"
            for row in self.rows()
            if not row["met"]
        ]

    def data(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {"about": dict(self.about), "figures": self.rows()}

    def table(self) -> str:
        """The figures as a Markdown table."""
        head = ("benchmark", "figure", f"{OURS}://", f"{BASELINE}://", "ratio", "target", "")
        lines = [head]
        for row in self.rows():
            if not row["detail"]:
                told = row["target"] and ("met" if row["met"] else "**missed**")
                values = (_short(row[OURS]), _short(row[BASELINE]), _short(row["ratio"]))
                lines.append((row["benchmark"], f"{row['figure']}, {row['unit']}", *values, row["target"], told))
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        lines.insert(1, tuple("-" * width for width in widths))
        return "\n".join(
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
            for line in lines
        )


def _short(value: float | None) -> str:
    """A number with three digits that count."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
