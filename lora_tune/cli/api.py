"""Python interface: ``from lora_tune import Sweep``, of a study file, or of a function and its space."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_tune.base.errors import InputError
from lora_tune.base.files import write_text
from lora_tune.cli import export
from lora_tune.cli.options import load_sweep, plan_of, refuse_marks, sweep_paths
from lora_tune.config.study import Study, find_study, load_study
from lora_tune.config.tables import Budget
from lora_tune.controller.runtime import Environment, driver, make_clock, open_sweep
from lora_tune.launchers import make_launcher
from lora_tune.review.config_check import toml_text
from lora_tune.review.screen import Plain, Quiet
from lora_tune.search.recommendation import Recommended, best_run, recommend
from lora_tune.store.leases import take_lease
from lora_tune.store.records import StudyRecords as Records
from lora_tune.store.records import Trial

if TYPE_CHECKING:
    from lora_tune.cli.ask_tell import Offer


class Sweep:
    """A sweep of one study, to run or review. It shares its records with the command line.

    Parameters
    ----------
    study : str, Path, function, or None
        ``NAME`` of ``studies/NAME.toml``, a shipped study, or a .toml file. A function is one trial: it takes the
        parameters of ``space`` by name (and ``SEED``, ``folder`` if it has them), and yields one eval at a time:
        ``(step, loss)``, a loss, or a mapping of metrics with ``step``. It runs in its own process.
        None: the keyword arguments define the study.
    name : str, optional
        Name of a study defined here; default: the function's name. Its file is ``sweeps/NAME/NAME.toml``.
    output : Path, optional
        The sweep's folder; default: ``sweeps/NAME``.
    storage : str, optional
        URL of its database; default: SQLite in the sweep's folder.
    quiet : bool
        Whether :meth:`run` prints nothing.
    space, objective, workload, search, pruning, site
        Sections of a study defined here, as in a study file. ``space`` also takes ``(low, high)`` or a list of choices.
    **budget
        Keys of ``[budget]`` for this run, such as ``trials=20, parallel=2``.

    Raises
    ------
    InputError
        If the study is missing or invalid, or a key is not in ``[budget]``; the message says what to do.
    """

    def __init__(
        self,
        study: str | Path | Callable[..., Any] | None = None,
        *,
        name: str | None = None,
        output: Path | str | None = None,
        storage: str | None = None,
        quiet: bool = False,
        space: Mapping[str, Any] | None = None,
        objective: Mapping[str, Any] | None = None,
        workload: Mapping[str, Any] | None = None,
        search: Mapping[str, Any] | None = None,
        pruning: Mapping[str, Any] | None = None,
        site: Mapping[str, Any] | None = None,
        **budget: Any,
    ) -> None:
        sections = {"space": space, "objective": objective, "workload": workload, "search": search,
                    "pruning": pruning, "site": site}  # fmt: skip
        if unknown := sorted(budget.keys() - Budget.model_fields.keys()):
            raise InputError(f"{unknown[0]!r} is not a key of [budget]; its keys: {', '.join(Budget.model_fields)}")
        stated = [key for key, value in {"name": name, **sections}.items() if value is not None]
        if isinstance(study, str | Path):
            if stated:
                raise InputError(f"{stated[0]} goes with a function, or without a study file; write it into {study}")
            file = find_study(str(study))
        else:
            named = name or str(getattr(study, "__name__", "mine"))
            folder = Path(output) if output else sweep_paths(named).root
            whole = {**sections, "budget": {"trials": 20, **budget}}
            file = write_study(folder / f"{named}.toml", whole, study)
        self._plan = plan_of(file, load_study(file), {"budget": budget}, Path(output) if output else None)
        self._storage, self._quiet = storage, quiet

    @property
    def study(self) -> Study:
        """The study, with the overrides of this sweep."""
        return self._plan.study

    @property
    def folder(self) -> Path:
        """The sweep's folder, with ``report.html`` and ``best/``."""
        return self._plan.paths.root

    def run(self) -> str:
        """Tune until the budget is spent, resuming an earlier run; returns the reason of the end.

        Ctrl-C raises KeyboardInterrupt and leaves the jobs running; the next call adopts them. Raises SetupError if the
        machine lacks something, StudyError for an EDIT mark, SweepBusyError while another driver runs.
        """
        from lora_tune.cli.options import feedback_if_known
        from lora_tune.cli.report import write_report

        plan, view = self._plan, Quiet() if self._quiet else Plain()
        refuse_marks(plan.file)
        launcher = make_launcher(plan.study, plan.paths.packs)
        clock = make_clock(plan.study, launcher)
        environment = Environment(launcher=launcher, clock=clock, view=view, pause=clock.sleep, fixed=True)
        store = open_sweep(plan, self._storage, clock.now())
        try:
            lease = take_lease(store, plan.study.name, clock.now())
            with driver(plan, store, lease, environment, accept_changes=False) as driving:
                outcome = driving.run()
                store.finish(lease, outcome.reason)
            export.export_best(plan.study, driving.sweep, plan.workload, plan.paths.best)
            feedback = feedback_if_known(store, plan.study.name)
            write_report(plan.study, driving.sweep, plan.paths.report, feedback, storage=self._storage)
        finally:
            store.close()
        return outcome.reason

    def ask(self, values: Mapping[str, Any] | None = None, commit: str | None = None) -> Offer:
        """The next trial for the caller to run, if ``site.launcher = "outside"``.

        values: parameters to try; the search fills in the others. commit: of the script to run. Raises InputError if no
        trial can start now; the message says what to do.
        """
        from lora_tune.cli.ask_tell import ask

        return ask(self._plan, self._storage, values, commit)

    def tell(
        self, token: str, evals: Sequence[Sequence[float]] = (), *, log: str = "", failed: str = "", over: bool = True
    ) -> Trial:
        """Report the result of a trial; returns the trial with its verdict. Repeating a report changes nothing.

        evals: (samples, loss) or (samples, loss, seconds since ask), all so far. log: its output instead, in the
        study's format. failed: why it has no result. over: whether it has ended; if not, a verdict means that it should
        stop, and None that it may continue. Raises InputError for impossible results.
        """
        from lora_tune.cli.ask_tell import result_of, tell

        return tell(self._plan, self._storage, token, result_of(evals, log=log, failed=failed, over=over))

    @property
    def records(self) -> Records:
        """Trials, attempts and evals in the database. Raises InputError before the first run."""
        return load_sweep(self.study.name, self._plan.paths, self._storage)

    @property
    def trials(self) -> list[Trial]:
        """The trials by number."""
        return list(self.records.trials.values())

    @property
    def best(self) -> Trial | None:
        """The best single run by the study's objective, None if there is none. Biased by luck: prefer
        :attr:`recommended`."""
        return best_run(self.study, self.records)

    @property
    def recommended(self) -> Recommended | None:
        """The recommended configuration, with the 90% interval of its mean; None if no trial counts."""
        return recommend(self.study, self.records)

    def values(self) -> list[Mapping[str, Any]]:
        """One row per trial, for a table: number, verdict, objective and parameters."""
        return [
            {
                "trial": t.number,
                "verdict": t.verdict and t.verdict.value,
                "objective": t.metrics.objective,
                **t.parameters,
            }
            for t in self.trials
        ]


SECTIONS = ("workload", "space", "objective", "search", "pruning", "budget", "site", "description", "division")
_RESERVED = ("SEED", "folder")
"""Arguments that a function may take besides the parameters of the space."""


def write_study(file: Path, sections: Mapping[str, Any], function: Callable[..., Any] | None = None) -> Path:
    """Write a study file with these sections, and the pickled trial function beside it, if any; returns the file.

    file: ends in .toml. sections: as in a study file; in ``space`` a pair (low, high) is a range, on a log scale if it
    is positive and spans a decade, and a list is a set of choices. Raises InputError for invalid sections.
    """
    if unknown := sorted(sections.keys() - {*SECTIONS}):
        raise InputError(f"{unknown[0]!r} is no section of a study; allowed are {', '.join(SECTIONS)}")
    table = {key: value for key, value in sections.items() if value is not None}
    space = table.get("space")
    if not isinstance(space, Mapping) or not space:
        raise InputError("space is missing: give what may vary, such as space={'LR': (1e-5, 1e-2)}")
    table["space"] = {name: _parameter(name, value) for name, value in space.items()}
    if function is not None:
        table["workload"] = _of_function(function, file.with_suffix(".pkl"), space, table)
        table.setdefault("objective", {"metric": "loss"})
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        text = toml_text(table)
    except AssertionError as error:
        raise InputError(
            f"{error.args[0]!r} is nothing that a study holds: numbers, texts, lists and mappings"
        ) from error
    write_text(file, "# Written by lora_tune.Sweep from Python's values.\n" + text)
    return file


def _parameter(name: str, value: Any) -> Any:
    if isinstance(value, tuple):
        if len(value) != 2 or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in value):
            raise InputError(f"space.{name} = {value!r}: a tuple is (low, high), two numbers; write a list of choices")
        low, high = value
        if isinstance(low, int) and isinstance(high, int):
            return {"type": "int", "low": low, "high": high}
        return {"type": "float", "low": float(low), "high": float(high), "log": low > 0 and high / low >= 10}
    if isinstance(value, list):
        return {"type": "categorical", "choices": value}
    return dict(value) if isinstance(value, Mapping) else value


def _of_function(
    function: Callable[..., Any], file: Path, space: Mapping[str, Any], table: Mapping[str, Any]
) -> dict[str, Any]:
    """``[workload]`` that runs a function, pickled into ``file``. Raises InputError if it cannot be run."""
    if "workload" in table:
        raise InputError("a function is the workload; give one of the two")
    parameters = inspect.signature(function).parameters.values()
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if absent := [n for n, p in named.items() if p.default is p.empty and n not in (*space, *_RESERVED)]:
        raise InputError(f"{function.__name__}() needs {absent[0]}, which space does not hold; add it, or a default")
    if not everything and (unread := [n for n in space if n not in named]):
        raise InputError(f"{function.__name__}() does not take {unread[0]}, which space holds; add it to either")
    names = [n for n in (*space, *_RESERVED) if n in named or (everything and n in space)]
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        import cloudpickle  # type: ignore[import-untyped,unused-ignore]

        file.write_bytes(cloudpickle.dumps(function))
    except Exception as error:
        problem = (
            f"{function.__name__}() cannot be handed to another process: {error}; keep open files, locks and models"
        )
        raise InputError(f"{problem} out of it, and make them within") from error
    argv = [
        sys.executable,
        "-m",
        "lora_tune.logs.function_trial",
        str(file.resolve()),
        *(f"{n}={{{n}}}" for n in names),
    ]
    return {"kind": "command", "argv": argv, "log": {"kind": "jsonl"}}
