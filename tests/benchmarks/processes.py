"""What the benchmarks run in processes of their own: ``python -m tests.benchmarks.processes FUNCTION JSON``.

Each prints what it returns as JSON, last.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from celery import Celery
from kombu import Connection, Consumer, Producer, Queue

import fairlanes_transport  # noqa: F401 - registers the transport for kombu

PER_MESSAGE = "tenant"


def _queue(name: str) -> Queue:
    return Queue(name, routing_key=name)


def publish(url: str, queue: str, n: int, lanes: int, *, delay: float = 0.0, per_second: float = 0.0) -> float:
    """Publish `n` messages into so many lanes; returns messages per second.

    Args:
        delay: seconds until each is due.
        per_second: at most so many a second; 0: as fast as it goes.
    """
    with Connection(url) as connection:
        channel = connection.channel()
        _queue(queue)(channel).declare()
        producer = Producer(channel)
        start = time.perf_counter()
        for number in range(n):
            headers: dict[str, Any] = {PER_MESSAGE: f"t{number % lanes}"}
            if delay:
                headers["eta"] = (datetime.now(timezone.utc) + timedelta(seconds=delay)).isoformat()
            if per_second:
                time.sleep(max(0.0, start + number / per_second - time.perf_counter()))
            producer.publish({"number": number}, routing_key=queue, headers=headers)
        return n / (time.perf_counter() - start)


def consume(url: str, queue: str, n: int, prefetch: int) -> dict[str, float]:
    """Deliver and ack `n` messages; returns messages per second, and CPU microseconds per message."""
    seen = 0

    def on_message(body: Any, message: Any) -> None:
        nonlocal seen
        seen += 1
        message.ack()

    with Connection(url) as connection:
        consumer = Consumer(connection.channel(), [_queue(queue)], callbacks=[on_message], prefetch_count=prefetch)
        consumer.consume()
        start, cpu = time.perf_counter(), time.process_time()
        while seen < n:
            connection.drain_events(timeout=10)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {"rate": n / seconds, "cpu": cpu / n * 1e6}


def park(url: str, queue: str, prefetch: int, *, consumers: int = 1, seconds: float = 0.0, lateness: str = "") -> None:
    """Wait in so many threads for messages, each with its own connection; a message takes `seconds`.  It never
    returns.

    Args:
        lateness: a file that gets a line per message that was due at a time: milliseconds between that and now.
    """
    waiting = threading.Barrier(consumers + 1)

    def wait() -> None:
        def on_message(body: Any, message: Any) -> None:
            if lateness:
                due = datetime.fromisoformat(message.properties["eta"])
                with Path(lateness).open("a") as file:
                    file.write(f"{(datetime.now(timezone.utc) - due).total_seconds() * 1000:.1f}\n")
            if seconds:
                time.sleep(seconds)
            message.ack()

        with Connection(url) as connection:
            consumer = Consumer(connection.channel(), [_queue(queue)], callbacks=[on_message], prefetch_count=prefetch)
            consumer.consume()
            # The first wait claims, and parks; the timeouts that follow leave it parked.
            _drain(connection, 0.2)
            waiting.wait()
            while True:
                _drain(connection, 60.0)

    for _ in range(consumers):
        threading.Thread(target=wait, daemon=True).start()
    waiting.wait()
    time.sleep(0.5)
    print("ready", flush=True)
    threading.Event().wait()


def _drain(connection: Connection, timeout: float) -> None:
    with contextlib.suppress(TimeoutError):
        connection.drain_events(timeout=timeout)


def produce(url: str, threads: int, each: int) -> None:
    """Send tasks from so many threads of one app, as a web process does, then say ``ready`` and stay."""
    app = Celery("bench", broker=url)
    app.conf.task_ignore_result = True
    barrier = threading.Barrier(threads + 1)

    def send() -> None:
        barrier.wait()
        for number in range(each):
            app.send_task("bench.noop", (number,), headers={PER_MESSAGE: f"t{number}"})
        barrier.wait()

    for _ in range(threads):
        threading.Thread(target=send, daemon=True).start()
    barrier.wait()
    barrier.wait()
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    functions = {f.__name__: f for f in (publish, consume, park, produce)}
    print(json.dumps(functions[sys.argv[1]](**json.loads(sys.argv[2]))), flush=True)
