"""One trial of a Python function: ``python -m lora_tune.logs.function_trial FILE NAME=VALUE ...``.

FILE is the function as pickled by ``Sweep``. Its yielded or returned values are printed as JSON lines, the only channel
from a trial to its sweep.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def main() -> int:
    """Run the function, print its evals and return the exit code. An exception ends the trial with a traceback."""
    file, *arguments = sys.argv[1:]
    sys.path.insert(0, str(Path.cwd()))  # location of the function's modules
    function = pickle.loads(Path(file).read_bytes())
    began = time.monotonic()
    print(json.dumps({"begun": True}), flush=True)
    for number, result in enumerate(_results(function(**dict(map(_argument, arguments)))), start=1):
        line = {"step": number, **_named(result)}
        print(json.dumps({"seconds": round(time.monotonic() - began, 6), **line}, default=float), flush=True)
    return 0


def _argument(argument: str) -> tuple[str, Any]:
    name, _, text = argument.partition("=")
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text


def _results(returned: Any) -> Iterator[Any]:
    """Values of a generator, or the single return value; nothing for None."""
    if isinstance(returned, Iterator):
        yield from returned
    elif returned is not None:
        yield returned


def _named(result: Any) -> dict[str, Any]:
    """One eval as a dict: from metrics by name, (step, loss), or a loss."""
    if isinstance(result, Mapping):
        return dict(result)
    if isinstance(result, tuple):
        step, loss = result
        return {"step": step, "loss": loss}
    return {"loss": result}


if __name__ == "__main__":
    sys.exit(main())
