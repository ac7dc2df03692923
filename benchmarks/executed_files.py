"""Count the files of the package whose functions run during a command.

Usage: `python -m benchmarks.executed_files generate stories "Once upon a time" --backend eager`. Module-level code and
class bodies, which run on import, do not count.
"""

import inspect
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

import qkv

PACKAGE = str(Path(qkv.__file__).parent)


def trace_files(arguments: list[str]) -> Counter[str]:
    """Run `qkv` with these arguments, and return the number of functions that were called in each file."""
    functions: set[CodeType] = set()

    def on_event(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        # Functions, unlike modules and class bodies, have optimized local variables.
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(PACKAGE):
            functions.add(code)

    from qkv.cli import main

    sys.argv = ["qkv", *arguments]
    threading.setprofile(on_event)
    sys.setprofile(on_event)
    try:
        main()
    except SystemExit as error:
        if error.code:
            raise
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return Counter(str(Path(code.co_filename).relative_to(PACKAGE)) for code in functions)


if __name__ == "__main__":
    counts = trace_files(sys.argv[1:])
    for name, n in sorted(counts.items()):
        sys.stderr.write(f"{n:5} {name}\n")
    sys.stderr.write(f"{len(counts)} files\n")
