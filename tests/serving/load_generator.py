"""Load test with many concurrent clients: status codes, latency and memory of the server.

`python -m tests.serving.load_generator --seconds 600 --clients 64` tests `qkv explore` with the shipped models.
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
"""Fraction of the time after which memory is measured, when models are loaded and all threads have started."""


@dataclass(frozen=True, kw_only=True)
class Models:
    """Models that the clients use. `paths` are passed to `qkv explore`."""

    gpt: str = "stories"
    bert: str = "bert"
    translator: str = "es-en"
    paths: tuple[str, ...] = ()


@dataclass
class LoadStatistics:
    """Status codes, errors, latencies of /api/health in seconds, and memory in bytes over time."""

    statuses: Counter = field(default_factory=Counter)
    errors: Counter = field(default_factory=Counter)
    health: list[float] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)

    def report(self, seconds: float) -> dict[str, object]:
        waits = sorted(self.health)
        sizes = [size for at, size in self.memory if at >= WARM_UP * seconds]
        tenth = max(1, len(sizes) // 10)
        first, last = (sum(part) / len(part) for part in (sizes[:tenth], sizes[-tenth:]))
        return {
            "seconds": round(seconds), "statuses": dict(self.statuses), "errors": dict(self.errors),
            "health_requests": len(waits), "health_p50_ms": round(1000 * waits[len(waits) // 2], 1),
            "health_p99_ms": round(1000 * waits[int(0.99 * len(waits))], 1),
            "health_slowest_ms": [round(1000 * wait) for wait in waits[-5:]],
            "memory_mb": [round(first / 2**20), round(last / 2**20)],
            "memory_growth_percent": round(100 * (last / first - 1), 2),
        }  # fmt: skip


async def send_random_request(
    client: httpx.AsyncClient, rng: random.Random, models: Models, statistics: LoadStatistics
) -> None:
    """Send a request like the page does. A fifth of the streams are abandoned after a few frames."""
    text = rng.choice(TEXTS)
    match rng.randrange(5):
        case 0 | 1:
            body = {"model": models.gpt, "text": text, "max_new": 30}
            async with client.stream("POST", "/api/generate", json=body) as response:
                n, disconnects = 0, rng.random() < 0.2
                async for _ in response.aiter_raw():
                    n += 1
                    if disconnects and n > 3:
                        break
                statistics.statuses[response.status_code] += 1
        case 2:
            body = {"model": rng.choice([models.gpt, models.bert]), "text": text}
            response = await client.post("/api/run", json=body)
            statistics.statuses[response.status_code] += 1
            if response.status_code == 200:
                response = await client.post("/api/heads", json={"run": response.json()["run"]})
                statistics.statuses[response.status_code] += 1
        case 3:
            response = await client.post("/api/translate", json={"model": models.translator, "text": "No lo sé."})
            statistics.statuses[response.status_code] += 1
        case _:
            response = await client.post("/api/cost", json={"model": models.gpt})
            statistics.statuses[response.status_code] += 1


async def run_client(
    address: str, number: int, models: Models, should_continue: Callable[[int], bool], statistics: LoadStatistics
) -> None:
    """Send requests as long as `should_continue(number of requests so far)` is true."""
    rng, counter = random.Random(number), itertools.count()
    async with httpx.AsyncClient(**client_settings(address)) as client:
        while should_continue(next(counter)):
            try:
                await send_random_request(client, rng, models, statistics)
            except httpx.HTTPError as error:
                statistics.errors[type(error).__name__] += 1
            await asyncio.sleep(rng.uniform(0.05, 0.5))


def poll_health(address: str, server: int, stop: threading.Event) -> LoadStatistics:
    """Poll /api/health. Runs in a separate process, because the clients would slow down the measurement."""
    statistics, start = LoadStatistics(), time.monotonic()
    first = psutil.Process(server)
    with httpx.Client(**client_settings(address)) as client:
        while not statistics.health or not stop.is_set():
            now = time.monotonic() - start
            request_start = time.perf_counter()
            response = client.get("/api/health")
            statistics.health.append(time.perf_counter() - request_start)
            statistics.statuses[f"health {response.status_code}"] += 1
            sizes = [process.memory_info().rss for process in (first, *first.children(recursive=True))]
            statistics.memory.append((now, sum(sizes)))
            time.sleep(0.2)
    return statistics


def warm_up_runs(address: str, models: Models) -> None:
    """Run every text once. Their activations are cached, so any growth after that is a leak."""
    with httpx.Client(**client_settings(address)) as client:
        for model in (models.gpt, models.bert):
            for text in TEXTS:
                client.post("/api/run", json={"model": model, "text": text}).raise_for_status()


def client_settings(address: str) -> dict[str, object]:
    base, token = re.fullmatch(r"(.*)/\?token=(.*)", address).groups()
    # Without verification, because reading the certificates takes 0.1 s for each client.
    return {"base_url": base, "headers": {"x-qkv-token": token}, "timeout": 180, "verify": False}


def run_load_test(
    *, n_clients: int, models: Models, seconds: float = math.inf, n_requests: float = math.inf
) -> dict[str, object]:
    """Start a server and let every client send requests for `seconds` or until it has sent `n_requests`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "qkv.cli", "explore", "--no-browser", "--port", str(port), *models.paths]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            address = server.stdout.readline().split()[-1]
            start = time.monotonic()
            statistics = _run_clients(
                address, server.pid, seconds, n_requests=n_requests, n_clients=n_clients, models=models
            )
            took = time.monotonic() - start
        finally:
            server.terminate()
            stderr = server.communicate(timeout=120)[1]
    return statistics.report(took) | {
        "exit": server.returncode,
        "stderr_errors": [line for line in stderr.splitlines() if "error" in line.lower()],
    }


def _run_clients(
    address: str, server: int, seconds: float, *, n_requests: float, n_clients: int, models: Models
) -> LoadStatistics:
    warm_up_runs(address, models)
    statistics, context = LoadStatistics(), get_context("spawn")

    async def run_all_clients() -> None:
        until = time.monotonic() + seconds

        def should_continue(n: int) -> bool:
            return n < n_requests and time.monotonic() < until

        await asyncio.gather(*(run_client(address, n, models, should_continue, statistics) for n in range(n_clients)))

    with context.Manager() as manager, ProcessPoolExecutor(1, context) as pool:
        stop = manager.Event()
        health = pool.submit(poll_health, address, server, stop)
        try:
            asyncio.run(run_all_clients())
        finally:
            stop.set()
        found = health.result()
    return LoadStatistics(statistics.statuses + found.statuses, statistics.errors, found.health, found.memory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=64)
    arguments = parser.parse_args()
    print(json.dumps(run_load_test(seconds=arguments.seconds, n_clients=arguments.clients, models=Models()), indent=1))
