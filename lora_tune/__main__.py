"""``lora-tune COMMAND``: the same commands as ``python -m lora_tune.COMMAND``, each imported when it is called."""

from __future__ import annotations

import importlib
from typing import Any

import click

from lora_tune import __version__

COMMANDS = {
    "init": "a first study file, from your script's output and help text",
    "sweep": "tune a study, or go on with it",
    "confirm": "more seeds of the leading trials, until one is shown to be better",
    "serve": "drive all studies of a database, as a service",
    "move": "a sweep's records into another database",
    "status": "where a sweep stands",
    "export": "the best trial as a config that runs by hand",
    "report": "write sweeps/STUDY/report.html",
    "dashboard": "review in optuna-dashboard",
    "logs": "what a study reads each line of a log as, before a node is spent",
    "replay": "what a sweep would have made of logs that exist already",
    "score": "result folders of MLPerf submissions, judged as MLPerf judges them",
    "ingest": "old MLLOG logs teach the search before it spends",
    "interchange": "all trials as CSV, Parquet, MLflow runs or TensorBoard events",
    "explain": "which knobs matter, why a trial ended, what to try next",
    "doctor": "what a study needs on this cluster, and how to fix what is missing",
}
"""Command -> one line of help. Each is a module of this package with a click command ``main``."""


def _module(command: str) -> str:
    """A command's module; of one that shares its name with a room, the room's ``__main__``."""
    return f"lora_tune.{command}.__main__" if command == "logs" else f"lora_tune.{command}"


class _Lazy(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        found: click.Command = importlib.import_module(_module(name)).main
        return found

    def format_commands(self, context: click.Context, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lora_tune")
def main() -> None:
    """Hyperparameter sweeps and convergence tuning of LoRA trials on Slurm."""


if __name__ == "__main__":
    main()
