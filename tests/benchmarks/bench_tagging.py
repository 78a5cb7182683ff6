"""What tagging costs: microseconds per publish, for each way in which a message gets its tenant.

Run ``python -m tests.benchmarks.bench_tagging``. It times `tenancy.resolve`, which the channel calls once per
message, without a broker, in processor time; "worst" is the slowest of five rounds. Exits with 1 when a way
costs 5 microseconds or more in the best round: the rounds differ by what else the machine does.
"""

from __future__ import annotations

import sys
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from celery import Celery
from celery._state import _task_stack
from celery.app.task import Context

from fairlanes_transport import tenant
from fairlanes_transport.options import Options
from fairlanes_transport.tenancy import resolve

LIMIT_US = 5.0
CALLS = 20_000
ROUNDS = 5

app = Celery("bench", broker="memory://")


@app.task(name="plain")
def plain() -> None:
    """Have no tenant."""


@app.task(name="owned", tenant="acme")
def owned() -> None:
    """Belong to a tenant by declaration."""


def headers(task: str = "plain", **more: Any) -> dict[str, Any]:
    """Return the headers of a task message, as many as Celery writes."""
    names = "lang shadow eta expires group group_index retries timelimit root_id origin argsrepr kwargsrepr"
    return {**dict.fromkeys(names.split()), "task": task, "id": "1", "parent_id": None, "stamps": {}, **more}


@contextmanager
def inside_task(header: dict[str, Any], calls: int = 0) -> Iterator[None]:
    """Be in a task, and in so many tasks called from it as functions."""
    requests = [Context(called_directly=False, is_eager=False, headers=header)]
    requests += [Context(called_directly=True) for _ in range(calls)]
    task = app.tasks["plain"]
    for request in requests:
        _task_stack.push(task)
        task.request_stack.push(request)
    try:
        yield
    finally:
        for _ in requests:
            task.request_stack.pop()
            _task_stack.pop()


def user_of(headers: dict[str, Any], properties: dict[str, Any]) -> str | None:
    """Derive a tenant; found by its dotted name."""
    return headers.get("customer")


def ways() -> Iterator[tuple[str, dict[str, Any], Options, Any]]:
    """Yield name, headers, options and what surrounds the publish."""
    plain_options = Options()
    named = Options(tenant_of=f"{__name__}:user_of")
    yield "explicit header", headers(tenant="acme"), plain_options, None
    yield "with tenant(...)", headers(), plain_options, tenant("acme")
    yield "stamp", headers(stamps={"tenant": ["acme"]}), plain_options, None
    yield "default of the task", headers("owned"), plain_options, None
    yield "inherited from the running task", headers(), plain_options, inside_task({"tenant": "acme"})
    yield "inherited, 2 calls deep", headers(), plain_options, inside_task({"tenant": "acme"}, calls=2)
    yield "tenant_of, by dotted name", headers(customer="acme"), named, None
    yield "no tenant", headers(), plain_options, None
    yield "no tenant, in a task", headers(), plain_options, inside_task({})


def microseconds(call: Callable[[], Any], copy: Callable[[], Any]) -> list[float]:
    """Return the time per call in each round, without the time of `copy`, which each call needs anew."""
    both = timeit.repeat(call, timer=time.process_time, number=CALLS, repeat=ROUNDS)
    alone = min(timeit.repeat(copy, timer=time.process_time, number=CALLS, repeat=ROUNDS))
    return [(seconds - alone) / CALLS * 1e6 for seconds in both]


def main() -> int:
    """Print a line per way; return the exit code."""
    failed = False
    app.finalize()
    for name, message, options, around in ways():
        with ExitStack() as stack:
            if around is not None:
                stack.enter_context(around)
            times = microseconds(
                lambda m=message, o=options: resolve(dict(m), {}, o),  # type: ignore[misc]
                lambda m=message: dict(m),  # type: ignore[misc]
            )
        failed |= min(times) >= LIMIT_US
        print(f"{name:34} {min(times):6.2f} us  (worst {max(times):.2f})")
    print(f"limit {LIMIT_US:.0f} us: {'broken' if failed else 'kept'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
