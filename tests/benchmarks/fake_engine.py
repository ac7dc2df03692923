"""A fake engine whose options determine its responses. It records when it was timed."""

import sys
from pathlib import Path

from benchmarks.engines.protocol import MissingPeerError, serve

state = {"times": 0}


def describe(request):
    state.update(request["options"])
    print("output of a peer on stdout")
    if "missing" in state:
        raise MissingPeerError(state["missing"])
    return {"versions": {state["name"]: "1.0"}}


def check(request):
    if state.get("fails"):
        raise ValueError("broken")
    return {"output": [state["output"]] * request["steps"]}


def measure(request):
    state["times"] += 1
    with Path(state["timing_log"]).open("a") as file:
        file.write(state["name"] + "\n")
    if state.get("exits_at") == state["times"]:
        print("out of memory", file=sys.stderr)
        sys.exit(3)
    seconds = state["seconds"][state["times"] - 1]
    return {"wall": seconds, "cpu": seconds / 2}


def ceilings(request):
    state["times"] += 1
    return {"ceilings": {str(threads): {"flops": 1e9 * state["times"], "bytes": 2e9} for threads in request["threads"]}}


if __name__ == "__main__":
    is_ceiling_process = sys.argv[1:] == ["ceilings"]
    serve({"describe": describe, "check": check, "time": ceilings if is_ceiling_process else measure})
