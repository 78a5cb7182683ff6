"""The figures of the demo: percentiles, Jain's index, and the service that counts for it."""

from __future__ import annotations

import pytest

from fairlanes_transport.demo.figures import Start, contested_service, fairness, jain, percentile, waits


def queue(*tenants: str) -> list[Start]:
    """Starts of one tenant after another, one a second from time 100 on, all sent at time 0."""
    return [Start(tenant, number, 0.0, 100.0 + number) for number, tenant in enumerate(tenants)]


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (20, 1.0), (50, 3.0), (95, 5.0), (100, 5.0)])
def test_percentile_is_the_nearest_rank(percent: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], percent) == value


def test_there_is_no_percentile_or_index_of_nothing() -> None:
    with pytest.raises(ValueError, match="of nothing"):
        percentile([], 50)
    with pytest.raises(ValueError, match="of nothing"):
        jain([0, 0])


@pytest.mark.parametrize(("values", "index"), [([7, 7, 7], 1.0), ([9, 0, 0], 1 / 3), ([3, 1], 0.8)])
def test_jain(values: list[int], index: float) -> None:
    assert jain(values) == pytest.approx(index)


def test_waits_are_of_the_named_tenants_and_sorted() -> None:
    starts = [Start("a", 0, 5.0, 9.0), Start("b", 0, 5.0, 6.0), Start("c", 0, 0.0, 50.0)]
    assert waits(starts, ["a", "b"]) == [1.0, 4.0]


def test_in_turn_is_fair_and_one_after_another_is_not() -> None:
    assert fairness(queue(*"abababa"), "ab") == 1.0
    # a's five before b's first; from then on a has nothing waiting
    assert contested_service(queue(*"aaaaabb"), "ab") == {"a": 5, "b": 0}
    assert fairness(queue(*"aaaaabb"), "ab") == 0.5


def test_what_ran_while_a_tenant_had_nothing_waiting_does_not_count() -> None:
    early = [Start("a", number, 0.0, 1.0 + number) for number in range(3)]
    contested = [Start("b", 0, 10.0, 11.0), Start("a", 3, 10.0, 12.0)]
    alone = [Start("a", 4, 10.0, 13.0)]
    assert contested_service([*early, *contested, *alone], "ab") == {"a": 0, "b": 1}


def test_no_index_when_the_tenants_never_waited_at_once() -> None:
    assert fairness([Start("a", 0, 0.0, 1.0), Start("b", 0, 2.0, 3.0)], "ab") is None
