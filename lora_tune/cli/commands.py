"""Options and help of each command; their modules are imported when a command runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from lora_tune.cli.options import (
    guarded,
    metrics_option,
    named_study_option,
    output_option,
    replaced_option,
    runs,
    storage_option,
    study_option,
    sweep_options,
)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="what the script printed in an earlier run, or metric files that it wrote (events, .csv, .jsonl)",
)
@click.option(
    "--output", default="mine.toml", show_default=True, type=click.Path(path_type=Path), help="the study file"
)
@click.option("--no-help", is_flag=True, help="do not run the command with --help to learn its options")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@runs("init")
def init(**options: Any) -> None:
    """Write a study for the COMMAND that runs your script today, such as: python train.py --lr 3e-4.

    The log's format and pattern are guessed from --log. The parameters are those of the script's own parser, asked
    in a run of `COMMAND --help` (at most 60 s). Every guess is commented in the file. Nothing is trained.
    Exit codes: 0 written; 2 your input; 3 the machine.
    """


quiet_option = click.option("--quiet", is_flag=True, help="print nothing but the result")
json_events_option = click.option("--json", "as_json", is_flag=True, help="print one JSON object an event")


@click.command()
@study_option
@click.option("--trials", type=int, help="number of trials, overrides the study")
@click.option("--parallel", type=int, help="trials at one time, overrides the study")
@click.option("--budget-node-hours", type=float, help="node-hours of all trials, overrides the study")
@click.option("--launcher", help="local or slurm, overrides the study's site")
@storage_option
@output_option
@click.option("--seed", type=int, help="seed of the search, overrides the study")
@click.option("--dry-run", is_flag=True, help="print the first proposals, files and commands; submit nothing")
@click.option(
    "--log", "logs", multiple=True, type=click.Path(path_type=Path), help="with --dry-run: show how this log is read"
)
@click.option("--accept-changes", is_flag=True, help="resume although the study file changed")
@click.option("--standby", is_flag=True, help="wait while another driver is at work, and take over when it is gone")
@replaced_option("--register", "start it: sweep itself is the service (docs/service.md)", is_flag=True)
@click.option(
    "--merge-rescued", is_flag=True, help="first put the folder's rescued.db back into the database, which lost some"
)
@metrics_option
@replaced_option(
    "--signing-key",
    "studies are started by their own units; there is no common service to sign for",
    variable="LORA_TUNE_SIGNING_KEY",
)
@quiet_option
@json_events_option
@runs("sweep")
def sweep(**options: Any) -> None:
    """Tune a study, or go on with it: trials run, stalled ones are stopped, the best is exported.

    Exit codes: 0 done; 2 your input; 3 the machine; 4 nothing reached the target; 130 interrupted.
    """


@click.command()
@study_option
@click.option("--top", type=click.IntRange(1), default=3, show_default=True, help="leading configurations that race")
@click.option(
    "--seeds",
    type=click.IntRange(1),
    help="runs by which the chosen one is scored, and most of each [those of a submission, else 10]",
)
@click.option(
    "--confidence",
    type=click.FloatRange(0.5, 0.999),
    default=0.95,
    show_default=True,
    help="of the winner's being better, over all looks together",
)
@click.option("--parallel", type=click.IntRange(1), help="runs at one time, overrides the study")
@click.option("--budget-node-hours", type=float, help="node-hours after which no further run is started")
@click.option("--launcher", help="local or slurm, overrides the study's site")
@storage_option
@output_option
@click.option("--dry-run", is_flag=True, help="print who would race and the first job; submit nothing")
@quiet_option
@json_events_option
@runs("confirm")
def confirm(**options: Any) -> None:
    """Run more seeds of a sweep's leading configurations until one is shown to be better, and score it.

    Exit codes: 0 done; 2 your input; 3 the machine; 4 nothing reached the target; 130 interrupted.
    """


@click.command()
@sweep_options
@click.option("--watch", is_flag=True, help="refresh until the sweep ends or Ctrl-C")
@click.option(
    "--every", "period", type=click.FloatRange(min=0.2), default=2.0, show_default=True, help="seconds, with --watch"
)
@click.option("--json", "json_", is_flag=True, help="one JSON object; with --watch, one a line")
@click.option("--all", "all_", is_flag=True, help="all trials, not only the open and the best")
@runs("status")
def status(**options: Any) -> None:
    """Where a sweep stands. Only reads, so it may run anywhere that reaches the database, any number of times.

    Exit codes: 0 the sweep runs, or ended with a best trial; 2 your input; 3 it is not over and nobody drives it, or
    the database does not answer; 4 the sweep ended and nothing reached the target. Made for monitoring.
    """


@click.command()
@sweep_options
@click.option("--enqueue", is_flag=True, help="try what --set says next, or --clone with the changes of --set")
@click.option("--set", "values", multiple=True, metavar="NAME=VALUE", help="a tuned value; the search fills in others")
@click.option("--clone", type=int, metavar="TRIAL", help="start from this trial's values")
@click.option("--commit", help="run the script of this commit, in a worktree of its own")
@click.option("--stop", "stops", type=int, multiple=True, metavar="TRIAL", help="end a trial; it counts as cancelled")
@click.option("--pause/--resume", "pause", default=None, help="propose nothing more, or resume; running trials go on")
@click.option("--parallel", type=int, help="trials at one time")
@click.option("--trials", type=int, help="number of trials")
@click.option("--node-hours", type=float, help="node-hours of all trials")
@click.option("--wall-hours", type=float, help="hours since the sweep began")
@click.option("--trial-minutes", type=float, help="limit of one trial; a job's own limit stays as it was submitted")
@click.option("--json", "json_", is_flag=True, help="one JSON object a request, one a line")
@runs("steer")
def steer(**options: Any) -> None:
    """Ask something of a sweep; its driver does it at its next look and says what it did. Without an option: list.

    Every request is kept with who asked and when, and shown by status. Exit codes: 0 noted; 2 your input; 3 the
    database does not answer.
    """


@click.command()
@sweep_options
@click.option(
    "--set", "values", multiple=True, metavar="NAME=VALUE", help="a tuned value to try; the search fills in others"
)
@click.option("--commit", help="run the script of this commit, in a worktree of its own; with --set")
@runs("ask_tell", "run_ask")
def ask(**options: Any) -> None:
    """Ask for the next trial and run it yourself: one JSON object with its token, parameters, seed and command.

    For studies with site.launcher = "outside"; say how it went with tell. Without --set the search proposes.
    Exit codes: 0 done; 2 your input, or nothing to run now; 3 the machine, or another driver is at work.
    """


@click.command()
@sweep_options
@click.option("--token", required=True, help="the token that ask gave")
@click.option("--evals", metavar="JSON", help="[[samples, loss], ...] or [[samples, loss, seconds], ...], all so far")
@click.option("--log", "log", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="its output instead")
@click.option("--failed", default="", metavar="WHY", help="why it has no result")
@click.option("--running", is_flag=True, help="it goes on: ask whether it should")
@runs("ask_tell", "run_tell")
def tell(**options: Any) -> None:
    """Tell how a trial that you asked for went; prints the verdict as one JSON object. The same told twice is one.

    With --running, "go_on" is false where it should be stopped. Seconds count from when it was asked for.
    Exit codes: 0 done; 2 your input; 3 the machine, or another driver is at work.
    """


@click.command()
@guarded
def schema() -> None:
    """Print the JSON schema of a study file. An editor completes and checks by it what a study may say.

    What it admits may still be refused with a sentence: rules between keys, and those of a workload, stand in the
    code. In the editor: a first line `#:schema study.schema.json` in the study, and this output in that file.
    Exit codes: 0 printed; 2 your input.
    """
    from lora_tune.config.study_schema import study_schema

    click.echo(json.dumps(study_schema(), indent=1))


@click.command()
@click.option("--study", "study_name", help="the only study that may be spoken of; without it any of this folder")
@storage_option
@output_option
@click.option(
    "--http", "where", metavar="[HOST:]PORT", help="answer by HTTP, on 127.0.0.1, to who has LORA_TUNE_MCP_TOKEN"
)
@runs("mcp")
def mcp(**options: Any) -> None:
    """Serve a sweep's tools to a model, by the Model Context Protocol on standard input and output.

    Whoever speaks to it starts programs as you do: give it to agents that may. Needs pip install "lora-tune[mcp]".
    Exit codes: 0 its client is gone; 2 your input; 3 the machine.
    """


@click.command()
@sweep_options
@click.option("--trial", "number", type=int, help="export this trial instead of what is recommended")
@click.option(
    "--nearest", "nearest_run", is_flag=True, help="export the trial that came nearest, where none reached the target"
)
@click.option("--to", "folder", type=click.Path(path_type=Path), help="folder to write to [the sweep's best/]")
@click.option(
    "--diff",
    "base",
    type=click.Path(path_type=Path),
    help="show what changes against this config_*.sh, here or in the implementation",
)
@click.option("--check", is_flag=True, help="source it in a clean bash; refuse variables that nothing reads")
@click.option("--json", "json_", is_flag=True, help="one JSON object: the file, the line that runs it, and what it is")
@runs("export")
def export(**options: Any) -> None:
    """Write the configuration that is believed best (or --trial N) as a config that runs by hand.

    Its provenance says what that rests on, and names the best single run beside it.
    Exit codes: 0 written; 2 your input; 3 the machine; 4 nothing reached the target.
    """


@click.command()
@sweep_options
@click.option("--to", "path", type=click.Path(path_type=Path), help="file to write [the sweep's report.html]")
@click.option(
    "--svg", "svg_folder", type=click.Path(path_type=Path), help="write each figure into this folder instead, as SVG"
)
@click.option("--png", type=click.Path(path_type=Path), help="the same as PNG, for slides")
@click.option("--pdf", type=click.Path(path_type=Path), help="the same as PDF")
@click.option("--json", "json_", is_flag=True, help="one JSON object: the files that were written")
@runs("report")
def report(**options: Any) -> None:
    """Write the sweep's report: one HTML file that needs no network.

    Exit codes: 0 written; 2 your input; 3 the machine.
    """


@click.command()
@sweep_options
@click.option("--host", default="127.0.0.1", show_default=True, help="address to listen on")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0: any free one")
@click.option("--no-token", is_flag=True, help="on 127.0.0.1 every user of this machine may read")
@runs("dashboard")
def dashboard(**options: Any) -> None:
    """Review the sweep in optuna-dashboard, also while it runs; it only shows. Ctrl-C ends.

    Exit codes: 0 ended in order; 2 your input; 3 the machine.
    """


@click.command()
@named_study_option
@click.option("--all", "every", is_flag=True, help="also print the lines that say nothing")
@click.option("--json", "json_", is_flag=True, help="one JSON object a log, one a line")
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path))
@runs("logs")
def logs(**options: Any) -> None:
    """Show what the study's reader makes of each line of a log (files, folders, .gz, tar). Nothing is started.

    Exit codes: 0 evals were read; 2 your input; 3 the machine; 4 no eval was read (then a pattern is suggested).
    """


@click.command()
@named_study_option
@click.option("--json", "as_json", is_flag=True, help="one JSON object a log, one a line")
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path))
@runs("replay")
def replay(**options: Any) -> None:
    """Play finished logs (files, folders, .gz, tar) through the study's pruning, capping, objective and diagnosis.

    Each log is a trial of one sweep, in the order given: those that reached the target are references and rivals of
    those after them. Facts of a run that the study leaves open (GBS, MAX_STEPS, FP4, HEALING_ITER) are the log's.
    Nothing is written.
    Exit codes: 0 played; 1 a fault of this program; 2 your input; 3 the machine; 4 no log could be read.
    """


@click.command()
@click.argument("folders", nargs=-1, required=True, metavar="FOLDER...", type=click.Path(path_type=Path))
@click.option("--ruleset", help="round of the rules, such as 6.1 [the newest that has the logs' benchmark]")
@click.option("--json", "json_", is_flag=True, help="one JSON object a folder, one a line")
@runs("score")
def score(**options: Any) -> None:
    """Score result folders as MLPerf would: compliance, convergence, olympic mean, normalisation.

    A FOLDER holds the result_*.txt (or .txt.gz) of one submission; one without any stands for those below it that do.
    Exit codes: 0 scored (also what MLPerf would refuse, which is said); 2 a folder cannot be scored; 3 the machine.
    """


@click.command()
@click.argument(
    "results", metavar="[RESULTS]", required=False, type=click.Path(path_type=Path, exists=True, file_okay=False)
)
@click.option("--study", "study_name", help="instead of RESULTS: run what its sweep recommends, and package that")
@storage_option
@output_option
@click.option(
    "--system", "system_file", required=True, metavar="FILE", type=click.Path(path_type=Path),
    help="system description, NAME.json; where it is missing, it is begun with what is known",
)  # fmt: skip
@click.option(
    "--code", metavar="FOLDER", type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="what was run: the implementation's folder, with its config [the study's]",
)  # fmt: skip
@click.option(
    "--config", "configs", multiple=True, metavar="FILE", type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="the exported config, copied beside the code; more than once for several",
)  # fmt: skip
@click.option(
    "--license", "license_file", metavar="FILE", type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="license of the code [the LICENSE in its folder]",
)  # fmt: skip
@click.option(
    "--borrow", multiple=True, metavar="FOLDER", type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="another submitter's result folder: what its hyperparameters would give here; with --dry-run",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="the chance to pass and the expected score; writes nothing")
@click.option("--out", default="submission", show_default=True, type=click.Path(path_type=Path), help="folder to make")
@click.option("--ruleset", help="round of the rules, such as 6.1 [the newest that has the logs' benchmark]")
@click.option("--json", "json_", is_flag=True, help="one JSON object; with --study those of confirm before it")
@runs("package")
def package(**options: Any) -> None:
    """Make a submission package of the runs in RESULTS, and have MLPerf's checkers look at it.

    RESULTS is the folder of result_*.txt that confirm writes. With --study NAME in its place the runs that a
    submission lacks are made first, as confirm makes them; killed, the same line goes on. The first runs in order
    count, as many as the benchmark wants; no log is changed. --dry-run says beforehand, from as few as one run, what a
    submission would score and the chance that it passes.
    Exit codes: 0 the checkers accept it; 2 they do not, or something is missing; 3 the machine; 4 nothing reached the
    target; 130 interrupted.
    Power measurements are left out.
    """


@click.command()
@named_study_option
@output_option
@click.option("--source", default="", help="who ran these, where [submitter and platform of the log, else its folder]")
@click.option("--set", "pairs", multiple=True, metavar="NAME=VALUE", help="a parameter that the runs do not state")
@click.option("--map", "maps", multiple=True, metavar="NAME=COLUMN", help="another program's name of it; eval=COLUMN")
@click.option("--yes", is_flag=True, help="take the columns that were shown")
@click.option("--json", "json_", is_flag=True, help="one JSON object; columns are shown on standard error")
@click.argument("sources", nargs=-1, required=True)
@runs("ingest")
def ingest(**options: Any) -> None:
    """Read old runs into a study as prior observations.

    SOURCE: logs in the study's form or MLLOG (files, folders, .gz, tar); an Optuna storage (address, SQLite or journal
    file), MLflow's folder or SQLite file, W&B's run files, TensorBoard's events, a CSV, TSV or Parquet table. Columns
    of such programs are shown first and taken with --yes. The same run again changes nothing; to take priors back,
    delete lines of sweeps/NAME/priors.jsonl.
    Exit codes: 0 something was taken, shown or known already; 2 your input; 3 the machine; 4 nothing was usable.
    """


@click.command()
@sweep_options
@click.option("--trial", "number", type=int, help="explain this trial only")
@click.option("--json", "as_json", is_flag=True, help="one JSON object")
@runs("explain")
def explain(**options: Any) -> None:
    """What a sweep taught: which knobs matter, advice with its evidence, and what would be tried next.

    With --trial N: why it was proposed, why it ended as it did, and how far it was.
    Exit codes: 0 printed; 2 your input; 3 the machine.
    """


@click.command()
@sweep_options
@click.option("--trial", "number", type=int, help="of the configuration that this trial is a run of alone")
@click.option("--json", "json_", is_flag=True, help="one JSON object")
@runs("verdict")
def verdict(**options: Any) -> None:
    """Which configurations are better than the baseline: at most 5% of campaigns call any better that is not.

    The baseline is the configuration that the sweep began with. A configuration's first run is what it was chosen by,
    and no evidence; run it again, and the baseline, too: steer --enqueue --clone TRIAL. Look as often as you like.
    Exit codes: 0 printed; 2 your input; 3 the machine.
    """


@click.command()
@sweep_options
@click.option("--probe", "with_probe", is_flag=True, help="also run one short job that checks from a node")
@click.option("--probe-minutes", type=float, default=10.0, show_default=True, help="longest wait for that job")
@click.option("--json", "json_", is_flag=True, help="one JSON object a finding, one a line")
@runs("doctor")
def doctor(**options: Any) -> None:
    """Check what a study needs: each finding says what, why it matters and how to fix it.

    Exit codes: 0 nothing stands in the way (there may be warnings); 2 your input; 3 there are problems.
    """
