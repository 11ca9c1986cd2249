"""``lora-tune COMMAND``: the same commands as ``python -m lora_tune.COMMAND``, each imported on use."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from lora_tune import __version__

COMMANDS = {
    "init": "a first study file, from your script's output and help text",
    "sweep": "tune a study, or go on with it",
    "confirm": "more seeds of the leading trials, until one is shown to be better",
    "status": "where a sweep stands",
    "steer": "ask something of a sweep that runs: try, stop, pause, change its budget",
    "ask": "the next trial, to be run by whoever asks",
    "tell": "how a trial that was asked for went",
    "schema": "the JSON schema of a study file, for editors",
    "mcp": "a sweep as tools of a model (Model Context Protocol)",
    "export": "the best trial as a config that runs by hand",
    "report": "write sweeps/STUDY/report.html",
    "dashboard": "review in optuna-dashboard",
    "logs": "what a study reads each line of a log as, before a node is spent",
    "replay": "what a sweep would have made of logs that exist already",
    "score": "result folders of MLPerf submissions, judged as MLPerf judges them",
    "package": "confirmed runs as an MLPerf submission package, checked by MLPerf's checkers",
    "ingest": "old MLLOG logs teach the search before it spends",
    "explain": "which knobs matter, why a trial ended, what to try next",
    "verdict": "which configurations are really better than the baseline",
    "doctor": "what a study needs on this cluster, and how to fix what is missing",
}
"""Command -> one line of help. Each is a module of this package with a click command ``main``."""

REPLACED = {"serve": "run `lora-tune sweep --study NAME --standby` as a service, one unit a study (docs/service.md)"}
"""Removed command -> what to do instead."""


def _module(command: str) -> str:
    """A command's module; ``logs`` is also a subpackage, so its command is that package's ``__main__``."""
    return f"lora_tune.{command}.__main__" if command == "logs" else f"lora_tune.{command}"


class _Lazy(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(_module(name)).main
        return command

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            if args[0] in REPLACED:
                context.fail(f"{args[0]!r} has left: {REPLACED[args[0]]}")
            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"commands: {', '.join(COMMANDS)}"
            context.fail(f"No such command {args[0]!r}; {hint}")
        return super().resolve_command(context, args)

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands with their help lines, without importing them, and this group's own options."""
        own = click.Command.shell_complete(self, context, incomplete)
        return [*(CompletionItem(name, help=h) for name, h in COMMANDS.items() if name.startswith(incomplete)), *own]

    def format_commands(self, context: click.Context, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _completion(context: click.Context, parameter: click.Parameter, shell: str | None) -> None:
    """Print the shell completion script."""
    if shell is None or context.resilient_parsing:
        return
    kind = get_completion_class(shell)
    assert kind is not None, "click.Choice admits no other"
    click.echo(kind(context.command, {}, "lora-tune", "_LORA_TUNE_COMPLETE").source())
    context.exit()


@click.group(cls=_Lazy, context_settings={"help_option_names": ["--help", "-h"]})
@click.version_option(__version__, prog_name="lora_tune")
@click.option(
    "--completion",
    type=click.Choice(["bash", "zsh", "fish"]),
    callback=_completion,
    is_eager=True,
    expose_value=False,
    help="print the completion script of a shell: source <(lora-tune --completion bash)",
)
def main() -> None:
    """Hyperparameter sweeps and convergence tuning of LoRA trials on Slurm."""


if __name__ == "__main__":
    main()
