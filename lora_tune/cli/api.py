"""A sweep from Python: ``from lora_tune import Sweep``, of a study file, or of a function and its space."""

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
    """A sweep of one study, to be run or looked at. The command line and this see the same records.

    Parameters
    ----------
    study : str, Path, function, or None
        ``NAME`` of ``studies/NAME.toml``, a shipped study, or a file that ends in .toml. A function is one trial: it
        takes the parameters of ``space`` by name (and ``SEED``, ``folder`` where it wants them), and yields an eval at
        a time, ``(step, loss)``, a loss, or a mapping of measures with ``step``. It runs in a process of its own.
        None: the study is made of keyword arguments alone.
    name : str, optional
        Of a study that is made here; the function's name where it is left out. Its file is ``sweeps/NAME/NAME.toml``.
    output : Path, optional
        The sweep's folder; ``sweeps/NAME`` where it is left out.
    storage : str, optional
        URL of its database; SQLite in the sweep's folder where it is left out.
    quiet : bool
        Whether :meth:`run` prints nothing.
    space, objective, workload, search, pruning, site
        Sections of a study that is made here, as its file has them. In ``space`` also ``(low, high)``, or a list.
    **budget
        Keys of ``[budget]`` that count for this run, such as ``trials=20, parallel=2``.

    Raises
    ------
    InputError
        The study is not there or cannot be used, or a key is none of ``[budget]``; its text says what to do.
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
        """The study as it is swept."""
        return self._plan.study

    @property
    def folder(self) -> Path:
        """The sweep's folder, with ``report.html`` and ``best/``."""
        return self._plan.paths.root

    def run(self) -> str:
        """Tune until the budget is spent, going on where an earlier run ended; returns why it is over.

        Ctrl-C ends it with KeyboardInterrupt and leaves the jobs running; the next call adopts them. Raises SetupError
        for what the machine lacks, StudyError for a mark EDIT, SweepBusyError while another driver is at work.
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
        """The next trial, to be run by the caller; for a study with ``site.launcher = "outside"``.

        values: what to try; the search fills in what they leave out. commit: whose script is run, with values. Raises
        InputError where nothing is to be run now, with what to do.
        """
        from lora_tune.cli.ask_tell import ask

        return ask(self._plan, self._storage, values, commit)

    def tell(
        self, token: str, evals: Sequence[Sequence[float]] = (), *, log: str = "", failed: str = "", over: bool = True
    ) -> Trial:
        """How the trial of a token went; the trial as it is judged then. The same told twice is one.

        evals: (samples, loss) or (samples, loss, seconds since it was asked for), all so far. log: its output instead,
        in the study's own form. failed: why it has no result. over: it has ended; else whether to go on is the
        verdict's, None while nothing speaks against it. Raises InputError for what cannot be.
        """
        from lora_tune.cli.ask_tell import result_of, tell

        return tell(self._plan, self._storage, token, result_of(evals, log=log, failed=failed, over=over))

    @property
    def records(self) -> Records:
        """Trials, attempts and evals as they are in the database now. Raises InputError before the first run."""
        return load_sweep(self.study.name, self._plan.paths, self._storage)

    @property
    def trials(self) -> list[Trial]:
        """The trials by number."""
        return list(self.records.trials.values())

    @property
    def best(self) -> Trial | None:
        """The best single run by the study's objective; None while none counts. Luck is part of it: take
        :attr:`recommended`."""
        return best_run(self.study, self.records)

    @property
    def recommended(self) -> Recommended | None:
        """What to take, with the 90% interval of its mean and why; None while no trial counts."""
        return recommend(self.study, self.records)

    def values(self) -> list[Mapping[str, Any]]:
        """A row a trial, for a table of any library: its number, its end, its objective and its parameters."""
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
"""What a function may take beside the parameters of the space."""


def write_study(file: Path, sections: Mapping[str, Any], function: Callable[..., Any] | None = None) -> Path:
    """Write a study file of these sections, and beside it the function that is one trial, if any; returns the file.

    file: ends in .toml. sections: as the file has them; in ``space`` a pair (low, high) is a range, on a log scale
    where it is positive and spans a decade, and a list is one of several values. Raises InputError for
    what cannot be swept.
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
    """``[workload]`` that runs a function, pickled into ``file``. Raises InputError for one that cannot be run."""
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
