"""An engine that only pretends: its options say what it answers, and it writes down when it was asked."""

import sys
from pathlib import Path

from benchmarks.engines.speaking import MissingPeerError, serve

state = {"times": 0}


def describe(question):
    state.update(question["options"])
    print("a peer's chatter on stdout")
    if "missing" in state:
        raise MissingPeerError(state["missing"])
    return {"versions": {state["name"]: "1.0"}}


def check(question):
    if state.get("fails"):
        raise ValueError("it broke")
    return {"output": [state["output"]] * question["steps"]}


def measure(question):
    state["times"] += 1
    with Path(state["diary"]).open("a") as diary:
        diary.write(state["name"] + "\n")
    if state.get("dies_at") == state["times"]:
        print("out of memory", file=sys.stderr)
        sys.exit(3)
    seconds = state["seconds"][state["times"] - 1]
    return {"wall": seconds, "cpu": seconds / 2}


def ceilings(question):
    state["times"] += 1
    return {
        "ceilings": {str(threads): {"flops": 1e9 * state["times"], "bytes": 2e9} for threads in question["threads"]}
    }


if __name__ == "__main__":
    is_meter = sys.argv[1:] == ["meter"]
    serve({"describe": describe, "check": check, "time": ceilings if is_meter else measure})
