"""Random mutations of bytes, JSON and safetensors files."""

import json
import random
import struct
from collections.abc import Callable
from typing import Any

HUGE = (2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 10**15, 10**30, -1, -(2**63))
VALUES: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: 0,
    lambda: -1,
    lambda: 10**15,
    lambda: 2**63,
    lambda: 10**400,
    lambda: 1.5,
    lambda: 1e308,
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: "",
    lambda: "x" * 5000,
    lambda: "../../../etc/passwd",
    lambda: "/etc/passwd",
    lambda: "a\0b",
    lambda: "\ud800",
    lambda: True,
    list,
    dict,
    lambda: [[[]]],
    lambda: {"": {"": None}},
    lambda: [1, "a", None],
    lambda: "gpt",
    lambda: list(range(500)),
)


def mutate_bytes(data: bytes, generator: random.Random, *, max_position: int | None = None) -> bytes:
    """Mutate bytes, only within the first `max_position` bytes if it is set."""
    end = min(len(data), max_position or len(data))
    position = generator.randrange(max(1, end))
    n = generator.randrange(1, 1 + max(1, min(64, end)))
    random_bytes = generator.randbytes(n)
    match generator.randrange(8):
        case 0:
            return data[:position]
        case 1:
            return data[:position] + data[position + n :]
        case 2:
            return data[:position] + random_bytes + data[position:]
        case 3:
            return data[:position] + data[position : position + n] * generator.randrange(2, 50) + data[position + n :]
        case 4:
            size = generator.choice((4, 8))
            value = (generator.choice(HUGE) % 2 ** (8 * size)).to_bytes(size, "little")
            return data[:position] + value + data[position + size :]
        case 5:
            return data[:position] + bytes(n) + data[position + n :]
        case 6:
            return data[:position] + random_bytes + data[position + n :]
        case _:
            flips = {
                generator.randrange(max(1, end)): 1 << generator.randrange(8) for _ in range(generator.randrange(1, 9))
            }
            return bytes(byte ^ flips.get(i, 0) for i, byte in enumerate(data))


def mutate_json(data: bytes, generator: random.Random) -> bytes:
    """Replace, delete, rename or duplicate one entry of a JSON document."""
    tree = json.loads(data)
    entries = list(_iterate_entries(tree))
    if not entries:
        return b"[" * generator.randrange(100_000)
    container, key = generator.choice(entries)
    match generator.randrange(6):
        case 0:
            del container[key]
        case 1 if isinstance(container, dict):
            container[str(key) + generator.choice(("x", "\0", " ", "_2"))] = container.pop(key)
        case 2:
            other_owner, other_key = generator.choice(entries)
            container[key] = json.loads(
                json.dumps(other_owner.get(other_key) if isinstance(other_owner, dict) else None)
            )
        case 3 if isinstance(container, dict):
            text = json.dumps(container)
            return json.dumps(tree).replace(text, text[:-1] + f", {json.dumps(key)}: 7}}", 1).encode()
        case _:
            container[key] = generator.choice(VALUES)()
    return json.dumps(tree).encode()


def mutate_safetensors(data: bytes, generator: random.Random) -> bytes:
    """Mutate mostly the header of a safetensors file."""
    n = struct.unpack_from("<Q", data)[0]
    if generator.random() < 0.5:
        return mutate_bytes(data, generator, max_position=8 + n)
    header = mutate_json(data[8 : 8 + n], generator)
    return struct.pack("<Q", len(header)) + header + data[8 + n :]


def _iterate_entries(tree: Any, depth: int = 0):
    """Yield (container, key) of all entries, but only the first few of nested lists and objects."""
    entries = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, value in entries if depth < 2 else entries[:5]:
        yield tree, key
        yield from _iterate_entries(value, depth + 1)
