"""The dashboard, the alert rules and the page about metrics name metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from fairlanes_transport.metrics import WorkerCollector
from fairlanes_transport.metrics.families import Families
from tests.harness import ROOT

DOCS = ROOT / "docs"
ALERTS = DOCS / "prometheus/alerts.yml"
DASHBOARD = DOCS / "grafana/fairlanes.json"
PAGE = DOCS / "how-to/metrics.md"


def exposed() -> set[str]:
    """Names as Prometheus sees them, a histogram by its plain name."""
    families = [*Families().all(), *WorkerCollector().describe()]
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in families}


def named(text: str) -> set[str]:
    found = set(re.findall(r"\bfairlanes_(?!transport)[a-z_]+", text))
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in found}


@pytest.mark.parametrize("path", [ALERTS, DOCS / "prometheus/alerts_test.yml", DASHBOARD, PAGE], ids=lambda p: p.name)
def test_every_metric_named_is_exposed(path: object) -> None:
    assert named(path.read_text("utf-8")) <= exposed()  # type: ignore[attr-defined]


def test_every_metric_is_on_the_page() -> None:
    assert exposed() <= named(PAGE.read_text("utf-8"))


def test_the_dashboard_is_one_that_grafana_can_lay_out() -> None:
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not taken & cells, f"panel {panel['title']!r} covers another"
        taken |= cells


def test_the_alert_rules() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on PATH")
    ran = subprocess.run(
        [promtool, "test", "rules", "alerts_test.yml"], cwd=ALERTS.parent, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
