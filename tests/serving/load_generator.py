"""Many clients at once, for as long as is asked: what they were answered, how quickly, and what memory it took.

`python -m tests.serving.load_generator --seconds 600 --clients 64`, on the shipped models, through `qkv explore` itself.
"""

import argparse
import asyncio
import itertools
import json
import math
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

import httpx
import psutil

TEXTS = [f"Once upon a time there were {n} cats and a dog." for n in range(2, 22)]
WARM_UP = 0.2
"""Of the time: models are read and threads have begun before memory is counted."""


@dataclass(frozen=True, kw_only=True)
class Models:
    """Whom the clients ask; `given` are paths that the server is started with."""

    gpt: str = "stories"
    bert: str = "bert"
    translator: str = "es-en"
    given: tuple[str, ...] = ()


@dataclass
class Seen:
    statuses: Counter = field(default_factory=Counter)
    errors: Counter = field(default_factory=Counter)
    health: list[float] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)

    def report(self, seconds: float) -> dict[str, object]:
        waits = sorted(self.health)
        kept = [size for at, size in self.memory if at >= WARM_UP * seconds]
        tenth = max(1, len(kept) // 10)
        first, last = (sum(part) / len(part) for part in (kept[:tenth], kept[-tenth:]))
        return {
            "seconds": round(seconds), "answers": dict(self.statuses), "errors": dict(self.errors),
            "health_asked": len(waits), "health_p50_ms": round(1000 * waits[len(waits) // 2], 1),
            "health_p99_ms": round(1000 * waits[int(0.99 * len(waits))], 1),
            "health_slowest_ms": [round(1000 * wait) for wait in waits[-5:]],
            "memory_mb": [round(first / 2**20), round(last / 2**20)],
            "memory_growth_percent": round(100 * (last / first - 1), 2),
        }  # fmt: skip


async def visit(client: httpx.AsyncClient, chance: random.Random, models: Models, seen: Seen) -> None:
    """One thing that a page asks for; a fifth of the streams are left after a few frames."""
    text = chance.choice(TEXTS)
    match chance.randrange(5):
        case 0 | 1:
            body = {"model": models.gpt, "text": text, "max_new": 30}
            async with client.stream("POST", "/api/generate", json=body) as answer:
                n, leaves = 0, chance.random() < 0.2
                async for _ in answer.aiter_raw():
                    n += 1
                    if leaves and n > 3:
                        break
                seen.statuses[answer.status_code] += 1
        case 2:
            body = {"model": chance.choice([models.gpt, models.bert]), "text": text}
            answer = await client.post("/api/run", json=body)
            seen.statuses[answer.status_code] += 1
            if answer.status_code == 200:
                answer = await client.post("/api/heads", json={"run": answer.json()["run"]})
                seen.statuses[answer.status_code] += 1
        case 3:
            answer = await client.post("/api/translate", json={"model": models.translator, "text": "No lo sé."})
            seen.statuses[answer.status_code] += 1
        case _:
            answer = await client.post("/api/cost", json={"model": models.gpt})
            seen.statuses[answer.status_code] += 1


async def keep_visiting(address: str, number: int, models: Models, goes_on: Callable[[int], bool], seen: Seen) -> None:
    """Visit as long as `goes_on(number of visits so far)`."""
    chance, visits = random.Random(number), itertools.count()
    async with httpx.AsyncClient(**reaching(address)) as client:
        while goes_on(next(visits)):
            try:
                await visit(client, chance, models, seen)
            except httpx.HTTPError as error:
                seen.errors[type(error).__name__] += 1
            await asyncio.sleep(chance.uniform(0.05, 0.5))


def keep_asking_health(address: str, server: int, is_over: threading.Event) -> Seen:
    """In a process of its own: beside the clients it would be their haste that is measured."""
    seen, begun = Seen(), time.monotonic()
    first = psutil.Process(server)
    with httpx.Client(**reaching(address)) as client:
        while not seen.health or not is_over.is_set():
            now = time.monotonic() - begun
            asked = time.perf_counter()
            answer = client.get("/api/health")
            seen.health.append(time.perf_counter() - asked)
            seen.statuses[f"health {answer.status_code}"] += 1
            sizes = [one.memory_info().rss for one in (first, *first.children(recursive=True))]
            seen.memory.append((now, sum(sizes)))
            time.sleep(0.2)
    return seen


def see_every_text(address: str, models: Models) -> None:
    """Traces are kept on purpose; once each text has one, what still grows is a leak."""
    with httpx.Client(**reaching(address)) as client:
        for model in (models.gpt, models.bert):
            for text in TEXTS:
                client.post("/api/run", json={"model": model, "text": text}).raise_for_status()


def reaching(address: str) -> dict[str, object]:
    base, token = re.fullmatch(r"(.*)/\?token=(.*)", address).groups()
    # Without certificates, which take a tenth of a second for each client to read.
    return {"base_url": base, "headers": {"x-qkv-token": token}, "timeout": 180, "verify": False}


def run(*, n_clients: int, models: Models, seconds: float = math.inf, n_visits: float = math.inf) -> dict[str, object]:
    """Let every client visit until its `seconds` or its `n_visits` are over."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "qkv.cli", "explore", "--no-browser", "--port", str(port), *models.given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            address = server.stdout.readline().split()[-1]
            begun = time.monotonic()
            seen = _visited(address, server.pid, seconds, n_visits=n_visits, n_clients=n_clients, models=models)
            took = time.monotonic() - begun
        finally:
            server.terminate()
            said = server.communicate(timeout=120)[1]
    return seen.report(took) | {
        "exit": server.returncode,
        "said": [s for s in said.splitlines() if "error" in s.lower()],
    }


def _visited(address: str, server: int, seconds: float, *, n_visits: float, n_clients: int, models: Models) -> Seen:
    see_every_text(address, models)
    seen, context = Seen(), get_context("spawn")

    async def all_at_once() -> None:
        until = time.monotonic() + seconds

        def goes_on(n: int) -> bool:
            return n < n_visits and time.monotonic() < until

        await asyncio.gather(*(keep_visiting(address, n, models, goes_on, seen) for n in range(n_clients)))

    with context.Manager() as manager, ProcessPoolExecutor(1, context) as apart:
        is_over = manager.Event()
        watched = apart.submit(keep_asking_health, address, server, is_over)
        try:
            asyncio.run(all_at_once())
        finally:
            is_over.set()
        found = watched.result()
    return Seen(seen.statuses + found.statuses, seen.errors, found.health, found.memory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=64)
    given = parser.parse_args()
    print(json.dumps(run(seconds=given.seconds, n_clients=given.clients, models=Models()), indent=1))
