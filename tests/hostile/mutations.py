"""How a good file becomes a bad one: bytes and JSON changed by chance, each from a seed."""

import json
import random
import struct
from collections.abc import Callable
from typing import Any

HUGE = (2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 10**15, 10**30, -1, -(2**63))
VALUES: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: 0, lambda: -1, lambda: 10**15, lambda: 2**63, lambda: 10**400, lambda: 1.5, lambda: 1e308,
    lambda: float("nan"), lambda: float("inf"), lambda: "", lambda: "x" * 5000, lambda: "../../../etc/passwd",
    lambda: "/etc/passwd", lambda: "a\0b", lambda: "\ud800", lambda: True, list, dict, lambda: [[[]]],
    lambda: {"": {"": None}}, lambda: [1, "a", None], lambda: "gpt", lambda: list(range(500)),
)  # fmt: skip


def changed_bytes(data: bytes, chance: random.Random, *, within: int | None = None) -> bytes:
    """`within`: only this many bytes from the start are touched."""
    end = min(len(data), within or len(data))
    at = chance.randrange(max(1, end))
    n = chance.randrange(1, 1 + max(1, min(64, end)))
    drawn = chance.randbytes(n)
    match chance.randrange(8):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + data[at + n :]
        case 2:
            return data[:at] + drawn + data[at:]
        case 3:
            return data[:at] + data[at : at + n] * chance.randrange(2, 50) + data[at + n :]
        case 4:
            size = chance.choice((4, 8))
            value = (chance.choice(HUGE) % 2 ** (8 * size)).to_bytes(size, "little")
            return data[:at] + value + data[at + size :]
        case 5:
            return data[:at] + bytes(n) + data[at + n :]
        case 6:
            return data[:at] + drawn + data[at + n :]
        case _:
            spots = {chance.randrange(max(1, end)): 1 << chance.randrange(8) for _ in range(chance.randrange(1, 9))}
            return bytes(byte ^ spots.get(i, 0) for i, byte in enumerate(data))


def changed_json(data: bytes, chance: random.Random) -> bytes:
    """One value, key or entry is another, gone, or there twice."""
    tree = json.loads(data)
    places = list(_places(tree))
    if not places:
        return b"[" * chance.randrange(100_000)
    owner, key = chance.choice(places)
    match chance.randrange(6):
        case 0:
            del owner[key]
        case 1 if isinstance(owner, dict):
            owner[str(key) + chance.choice(("x", "\0", " ", "_2"))] = owner.pop(key)
        case 2:
            other, its_key = chance.choice(places)
            owner[key] = json.loads(json.dumps(other.get(its_key) if isinstance(other, dict) else None))
        case 3 if isinstance(owner, dict):
            text = json.dumps(owner)
            return json.dumps(tree).replace(text, text[:-1] + f", {json.dumps(key)}: 7}}", 1).encode()
        case _:
            owner[key] = chance.choice(VALUES)()
    return json.dumps(tree).encode()


def changed_safetensors(data: bytes, chance: random.Random) -> bytes:
    """Mostly the header: what its numbers say of a file that is otherwise whole."""
    n = struct.unpack_from("<Q", data)[0]
    if chance.random() < 0.5:
        return changed_bytes(data, chance, within=8 + n)
    header = changed_json(data[8 : 8 + n], chance)
    return struct.pack("<Q", len(header)) + header + data[8 + n :]


def _places(tree: Any, depth: int = 0):
    """Every (owner, key) of a tree; of a long list or table only the first few."""
    entries = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, value in entries if depth < 2 else entries[:5]:
        yield tree, key
        yield from _places(value, depth + 1)
