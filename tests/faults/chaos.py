"""A chaos run: workers, their children, connections and the broker are killed and stopped at random, and a ledger
proves for each task what became of it.

    python -m tests.faults.chaos --seconds 600 --seed 1 --workers 3

Each task notes its start and its end on a server of its own, which nobody harms. In the end:

* lost: submitted and never finished. There must be none.
* a duplicate is a second start. It is explained if the process of an earlier start was killed, or stopped past its
  lease, between that start and the moment when its ack can be taken to have arrived; or if its own process was stopped
  past its lease with the task in hand. There must be no other.
* recovery: from a kill to the next start of each task that it interrupted, without the time in which there was no
  broker.
* the invariants of the queue hold, nothing is left in it, and no worker has ended by itself.

Prints a table, or with ``--json`` one line; the exit code is 0 if all is well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from fairlanes_transport.demo.figures import percentile
from tests.harness import Sender, Server, Worker, recorded
from tests.invariants import check

#: An ack of a task that has ended has arrived after so many seconds, if the broker could be reached.
ACK_SECONDS = 1.0
#: What a pool had in hand when it was stopped begins so soon after it goes on.
RESUME_SECONDS = 1.0
#: One after another, for as many workers as there are.
POOLS = ("prefork", "threads", "prefork", "gevent")


@dataclass
class Blow:
    """Something that was done to processes, from `begin` to `end` (a kill has only one moment)."""

    kind: str
    begin: float
    end: float
    pids: frozenset[int] = frozenset()


@dataclass
class Run:
    """One start of a task."""

    pid: int
    begin: float
    end: float = float("inf")


@dataclass
class Result:
    """What a run has shown."""

    seconds: float
    seed: int
    lease: float
    submitted: int = 0
    maybe: int = 0
    started: int = 0
    finished: int = 0
    lost: list[int] = field(default_factory=list)
    duplicates: int = 0
    unexplained: list[int] = field(default_factory=list)
    blows: dict[str, int] = field(default_factory=dict)
    interrupted: int = 0
    recovery_p50: float | None = None
    recovery_p99: float | None = None
    recovery_max: float | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    invariants: str = "hold"
    exits: list[int] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """Processes and groups that were killed."""
        return sum(count for kind, count in self.blows.items() if kind.startswith("kill"))

    @property
    def sound(self) -> bool:
        """Whether all is as it must be."""
        late = self.recovery_p99 is not None and self.recovery_p99 > self.lease + 2
        left = any(self.sizes.values()) or self.invariants != "hold"
        died = any(self.exits) or "exit of its own" in self.blows
        return not (self.lost or self.unexplained or late or left or died)


class Chaos:
    """A broker, workers on it, and what happens to them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.random = random.Random(options.seed)
        self.broker = Server(options.kind, "--appendonly", "yes", "--appendfsync", "always")
        self.ledger = Server(options.kind)
        self.workers: list[Worker] = []
        self.blows: list[Blow] = []
        self.submitted: set[int] = set()
        self.maybe: set[int] = set()
        self.outages: list[tuple[float, float]] = []
        self._lock = threading.Lock()
        self._over = threading.Event()

    # workers

    def start_worker(self, n: int) -> Worker:
        """Start worker number `n`; it is not waited for."""
        pool = POOLS[n % len(POOLS)]
        options = {"lease_seconds": self.options.lease, "client_name": f"w{n}"}
        return Worker(
            self.broker, "-n", f"w{n}@chaos", app="tests.apps.faults", pool=pool, concurrency=3, prefetch=4,
            conf={"broker_transport_options": options, "worker_send_task_events": False},
            env={"FAIRLANES_TEST_PORT": str(self.ledger.port)},
        )  # fmt: skip

    def replace(self, n: int) -> None:
        """Start a worker in the place of one that has ended, and keep its log."""
        old = self.workers[n]
        self.keep_log(n, old)
        with contextlib.redirect_stdout(None):
            old.close()
        self.workers[n] = self.start_worker(n)

    def keep_log(self, n: int, worker: Worker) -> None:
        """Write a worker's log where ``--logs`` says."""
        if self.options.logs:
            Path(self.options.logs, f"w{n}-{worker.pid}.log").write_text(worker.text(), "utf-8")

    def ready(self) -> int | None:
        """A worker that is up; None: it would be the last one."""
        up = [n for n, worker in enumerate(self.workers) if " ready." in worker.text()]
        return self.random.choice(up) if len(up) > 1 else None

    # what is done to them

    def note(self, kind: str, begin: float, pids: set[int] | frozenset[int] = frozenset()) -> None:
        """Write a blow down."""
        with self._lock:
            self.blows.append(Blow(kind, begin, time.time(), frozenset(pids)))

    def kill_worker(self) -> None:
        """SIGKILL a worker with its children, and start another."""
        n = self.ready()
        if n is None:
            return
        pids = _group(self.workers[n].pid)
        begin = time.time()
        self.workers[n].kill()
        self.note("kill worker", begin, pids)
        self.replace(n)

    def kill_child(self) -> None:
        """SIGKILL one pool process."""
        # One that dies while its worker starts ends the worker, with any broker.
        up = [worker for worker in self.workers if " ready." in worker.text()]
        children = [(worker, pid) for worker in up for pid in _group(worker.pid) - {worker.pid}]
        if not children:
            return
        _, pid = self.random.choice(children)
        begin = time.time()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.note("kill child", begin, {pid})

    def stop_worker(self) -> None:
        """SIGSTOP a worker with its children: long enough to lose its leases, or not nearly."""
        worker = self.random.choice(self.workers)
        past = self.random.random() < 0.5
        seconds = self.options.lease * (self.random.uniform(1.2, 2) if past else self.random.uniform(0.1, 0.4))
        pids = _group(worker.pid)
        begin = time.time()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGSTOP)
            self._over.wait(seconds)
            os.killpg(worker.pid, signal.SIGCONT)
            self.note("stop past lease" if past else "stop", begin, pids if past else frozenset())

    def cut_connections(self) -> None:
        """CLIENT KILL one connection of a worker, or all of them."""
        client = self.broker.client()
        names = {f"w{n}" for n in range(len(self.workers))}
        found = [each for each in client.client_list() if each["name"] in names]
        if not found:
            return
        if self.random.random() < 0.3:
            name = self.random.choice(found)["name"]
            found = [each for each in found if each["name"] == name]
        else:
            found = [self.random.choice(found)]
        begin = time.time()
        for each in found:
            client.client_kill_filter(_id=each["id"])
        self.note("cut", begin)

    def restart_broker(self) -> None:
        """SIGKILL the broker, and start it again with its append-only file."""
        begin = time.time()
        self.broker.kill()
        self._over.wait(self.random.uniform(0, 2))
        self.broker.start()
        self.outages.append((begin, time.time()))
        self.note("restart broker", begin)

    def warm_restart(self) -> None:
        """SIGTERM a worker, and start another when it has ended."""
        n = self.ready()
        if n is None:
            return
        begin = time.time()
        self.workers[n].stop(signal.SIGTERM, 60)
        self.note("warm restart", begin)
        self.replace(n)

    def harm(self) -> None:
        """Do one of these after another, until the time is over."""
        ways: list[tuple[Callable[[], None], int]] = [
            (self.kill_worker, 30), (self.kill_child, 30), (self.stop_worker, 10), (self.cut_connections, 18),
            (self.restart_broker, 5), (self.warm_restart, 7),
        ]  # fmt: skip
        until = time.monotonic() + self.options.seconds
        while time.monotonic() < until:
            self._over.wait(min(self.random.expovariate(1 / self.options.every), until - time.monotonic()))
            if time.monotonic() >= until:
                break
            for n, worker in enumerate(self.workers):
                if worker.poll() is not None:
                    self.note("exit of its own", time.time())
                    self.replace(n)
            way = self.random.choices([way for way, _ in ways], [weight for _, weight in ways])[0]
            try:
                way()
            except redis.exceptions.RedisError as exc:
                print(f"chaos: {way.__name__}: {exc}", file=sys.stderr)

    # tasks

    def submit(self) -> None:
        """Send tasks at a steady rate, until the time is over."""
        chance = random.Random(self.options.seed + 1)
        with Sender(self.broker, "fairlanes") as sender:
            begin = time.monotonic()
            i = 0
            while (now := time.monotonic()) < begin + self.options.seconds:
                if i > (now - begin) * self.options.rate:
                    time.sleep(0.005)
                    continue
                i += 1
                luck = chance.random()
                # Most are short; one in 2,000 is longer than its lease.
                seconds = self.options.lease * 2 if luck > 0.9995 else chance.uniform(0, 0.15) * (luck > 0.5)
                self.publish(sender, i, seconds, chance.randrange(20))

    def publish(self, sender: Sender, i: int, seconds: float, tenant: int) -> None:
        """Send one task; one whose publish has failed may or may not be there."""
        try:
            sender.send("faults.lost", i, seconds, tenant=f"t{tenant}")
        except Exception:
            self.maybe.add(i)
            time.sleep(0.05)
        else:
            self.submitted.add(i)

    # the run

    def run(self) -> Result:
        """Do it all, and judge."""
        self.broker.start()
        self.ledger.start()
        self.workers = [self.start_worker(n) for n in range(self.options.workers)]
        for worker in self.workers:
            worker.wait_ready(60)
        submitting = threading.Thread(target=self.submit, daemon=True)
        submitting.start()
        self.harm()
        submitting.join(60)
        self._over.set()
        self.drain()
        result = self.judge()
        for n, worker in enumerate(self.workers):
            result.exits.append(worker.stop(signal.SIGTERM, 60))
            self.keep_log(n, worker)
        return result

    def drain(self) -> None:
        """Wait until all has been done, or nothing more will be."""
        deadline = time.monotonic() + 6 * self.options.lease + 60
        while time.monotonic() < deadline:
            done = {each["i"] for each in recorded(self.ledger)}
            with contextlib.suppress(redis.exceptions.RedisError):
                if self.submitted <= done and not self.broker.client().zcard("fairlanes:2:{celery}:leases"):
                    return
            time.sleep(0.5)

    def judge(self) -> Result:
        """Read the ledger."""
        result = Result(self.options.seconds, self.options.seed, self.options.lease)
        runs = self.runs()
        finished = {each["i"] for each in recorded(self.ledger)}
        result.submitted, result.maybe = len(self.submitted), len(self.maybe)
        result.started, result.finished = sum(map(len, runs.values())), len(finished)
        result.lost = sorted(self.submitted - finished)
        recoveries = []
        for i, found in runs.items():
            for n, run in enumerate(found[:-1]):
                result.duplicates += 1
                blow = self.explanation(run, found[n + 1])
                if blow is None:
                    result.unexplained.append(i)
                    self.show(i, found, "was started again for no known reason")
                elif blow.kind.startswith("kill") and run.end == float("inf"):
                    recoveries.append(self.recovery(blow.begin, found[n + 1].begin))
                    if recoveries[-1] > self.options.lease + 2:
                        self.show(i, found, f"was interrupted and came back after {recoveries[-1]:.1f} s")
        for blow in self.blows:
            result.blows[blow.kind] = result.blows.get(blow.kind, 0) + 1
        result.interrupted = len(recoveries)
        if recoveries:
            recoveries.sort()
            result.recovery_p50 = round(statistics.median(recoveries), 2)
            result.recovery_p99 = round(percentile(recoveries, 99), 2)
            result.recovery_max = round(recoveries[-1], 2)
        try:
            state = check(self.broker.client(), "celery", token_out=True)
        except AssertionError as exc:
            result.invariants = str(exc).splitlines()[0]
        else:
            result.sizes = {
                "ready": sum(map(len, state.ready.values())),
                "leased": len(state.leases), "delayed": len(state.delayed), "dead": len(state.dead),
            }  # fmt: skip
        return result

    def runs(self) -> dict[int, list[Run]]:
        """Every start of each task, in order."""
        runs: dict[int, list[Run]] = defaultdict(list)
        for each in recorded(self.ledger, "started"):
            runs[each["i"]].append(Run(each["pid"], each["t"]))
        for each in recorded(self.ledger):
            for run in reversed(runs[each["i"]]):
                if run.pid == each["pid"] and run.begin <= each["t"] and run.end == float("inf"):
                    run.end = each["t"]
                    break
        for found in runs.values():
            found.sort(key=lambda run: run.begin)
        return runs

    def explanation(self, run: Run, following: Run) -> Blow | None:
        """What has kept a run from being acked, before the next one began."""
        acked = self.acked(run.end)
        for blow in self.blows:
            if run.pid in blow.pids and blow.begin <= min(acked, following.begin) and blow.end >= run.begin:
                return blow
            resumed = blow.end - 0.1 <= following.begin <= blow.end + RESUME_SECONDS
            if blow.kind == "stop past lease" and following.pid in blow.pids and resumed:
                return blow  # the pool had the job in hand when it was stopped
        return None

    def recovery(self, kill: float, start: float) -> float:
        """Seconds from a kill to the next start, without those in which there was no broker."""
        return start - kill - sum(max(0.0, min(start, back) - max(kill, begin)) for begin, back in self.outages)

    def acked(self, end: float) -> float:
        """When the ack of a run that ended then can be taken to have arrived."""
        at = end + ACK_SECONDS
        for begin, back in self.outages:
            if begin <= at and end <= back:
                at = max(at, back + 15)  # its worker has to connect again
        return at

    def show(self, i: int, found: list[Run], what: str) -> None:
        """Say on stderr what is known of a task."""
        print(f"chaos: task {i} {what}: {found}", file=sys.stderr)
        for blow in self.blows:
            if found[0].begin - 30 < blow.end and blow.begin < found[-1].begin:
                pids = sorted(blow.pids) if len(blow.pids) < 9 else len(blow.pids)
                print(f"    {blow.kind} {blow.begin:.3f}-{blow.end:.3f} {pids}", file=sys.stderr)

    def close(self) -> None:
        """Kill what is left."""
        with contextlib.redirect_stdout(None):
            for worker in self.workers:
                worker.close()
        self.broker.close()
        self.ledger.close()


def _group(leader: int) -> set[int]:
    """The processes of a group."""
    pids = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[2]) == leader:
                    pids.add(int(entry.name))
    return pids


def _rows(result: Result) -> Iterator[tuple[str, Any]]:
    yield "seconds, seed, lease", f"{result.seconds:g}, {result.seed}, {result.lease:g} s"
    yield "submitted (and perhaps)", f"{result.submitted} (+ {result.maybe} whose publish failed)"
    yield "finished", result.finished
    yield "lost", len(result.lost)
    yield "duplicates", result.duplicates
    yield "not explained by a kill or stop", len(result.unexplained)
    yield "kills", result.kills
    for kind, count in sorted(result.blows.items()):
        yield f"    {kind}", count
    yield "tasks that a kill interrupted", result.interrupted
    yield "recovery p50, p99, max", f"{result.recovery_p50}, {result.recovery_p99}, {result.recovery_max} s"
    yield "left in the queue", result.sizes
    yield "invariants", result.invariants
    yield "exit codes", result.exits


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.chaos", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600, help="how long to harm and submit (600)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random (1)")
    parser.add_argument("--workers", type=int, default=3, help="how many, in several pools (3)")
    parser.add_argument("--lease", type=float, default=5, help="lease_seconds (5)")
    parser.add_argument("--rate", type=float, default=60, help="tasks submitted per second (60)")
    parser.add_argument("--every", type=float, default=4, help="mean seconds between blows (4)")
    parser.add_argument("--kind", default="valkey", choices=("redis", "valkey"), help="of server (valkey)")
    parser.add_argument("--logs", help="directory for the workers' logs")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args(arguments)
    if options.logs:
        Path(options.logs).mkdir(parents=True, exist_ok=True)
    chaos = Chaos(options)
    try:
        result = chaos.run()
    finally:
        chaos.close()
    if options.json:
        print(json.dumps({**vars(result), "kills": result.kills, "sound": result.sound}))
    else:
        for name, value in _rows(result):
            print(f"{name:34} {value}")
        print("sound" if result.sound else "NOT SOUND")
    return 0 if result.sound else 1


if __name__ == "__main__":
    sys.exit(main())
