"""A race between the leading trials of a sweep: which of their configurations runs next, and with which seeds.

Replicates are trials of a sweep of their own, ``NAME.confirm``, in the same database: the sweep's own trials, budget
and search stay what they are. Where a race stands follows from its records alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lora_tune.base.errors import InputError, SetupError
from lora_tune.base.text import counted
from lora_tune.cli.options import again, typed
from lora_tune.config.study import Study
from lora_tune.logs.run import Eval
from lora_tune.review.stopping import name_of, replicates, results
from lora_tune.review.summary import parameters_text, race_words, ranked
from lora_tune.search.comparison import ComparisonPlan, ComparisonRules, plan
from lora_tune.search.objectives import objective_of
from lora_tune.search.race_scale import RaceScale
from lora_tune.search.recommendation import recommend
from lora_tune.store.records import StudyRecords, Trial, TrialState, Verdict

if TYPE_CHECKING:
    from lora_tune.search.session import Asked

SEEDS_OFFSET = 1000
"""Added to the study's ``search.seed``: no replicate has a seed of the sweep's first million trials."""

TOP = 3
"""Configurations that race where nobody says how many."""

FAILURES = 3
"""Replicates of one configuration that may fail for reasons of the machine before the race stops."""


FEWEST = 3
"""Runs of each configuration before the first look."""


def race_settings(
    study: Study, field: int, seeds: int, *, per_job: int, confidence: float, scale: RaceScale
) -> ComparisonRules:
    """How ``field`` configurations are compared by at most ``seeds`` runs each. per_job: seeds that one job can run.

    Where trials share a job, as many run between two looks as have room at one time: runs side by side cost less than
    a job that waits for the next look.
    """
    at_once = study.budget.parallel // field if study.site.slots is not None else 1
    return ComparisonRules(
        confidence=confidence,
        fewest=min(max(FEWEST, at_once), seeds),
        most=seeds,
        batch=min(max(per_job, at_once), seeds),
        scale=scale,
    )


def contenders(study: Study, sweep: StudyRecords, top: int) -> list[Trial]:
    """The ``top`` leading trials with different configurations: first what the sweep recommends, if it was run.

    Raises InputError where no trial reached the target.
    """
    leaders: list[Trial] = []
    believed = recommend(study, sweep)
    first = [believed.trial] if believed is not None and believed.ran else []
    for trial in [*first, *ranked(study, sweep)]:
        if all(trial.parameters != other.parameters for other in leaders):
            leaders.append(trial)
    if not leaders:
        raise InputError(f"{study.name}: {objective_of(study).nothing}; nothing to confirm")
    return leaders[:top]


class Race:
    """Proposes replicates to the driver, as a sampler proposes trials. It remembers nothing that the records do not.

    study: of the sweep. records: the race's sweep as it is now. per_job: seeds that one job can run. say: told where
    the race stands whenever as many runs have ended as there are configurations.
    """

    def __init__(
        self,
        study: Study,
        field: Sequence[Trial],
        settings: ComparisonRules,
        records: Callable[[], StudyRecords],
        *,
        per_job: int,
        say: Callable[[str], None],
    ) -> None:
        self._study, self._field, self._settings, self._records = study, field, settings, records
        self._per_job, self._say = per_job, say
        self._failed: Counter[int] = Counter()
        self._told = 0

    def standing(self) -> ComparisonPlan:
        """Where the race stands."""
        runs = results(replicates(self._records()), [t.number for t in self._field])
        return plan(runs, self._settings)

    def ask(self) -> Asked | str:
        """The next job, or why there is none. Raises SetupError where the machine fails the same runs."""
        records = self._records()
        done, stands = replicates(records), self.standing()
        going = [t for t in records.trials.values() if t.state is not TrialState.FINISHED]
        for trial in self._field:
            known = len(done.get(trial.number, ())) + sum(t.replicates for t in going if t.replicate_of == trial.number)
            short = stands.wanted.get(name_of(trial.number), 0) - known
            if short > 0:
                self._refuse_failing(trial)
                return self._again(trial, known, min(short, self._per_job), records)
        if stands.verdict:
            return stands.verdict.sentence
        return "1 run goes on" if len(going) == 1 else f"{len(going)} runs go on"

    def _again(self, trial: Trial, measured: int, count: int, records: StudyRecords) -> Asked:
        from lora_tune.search.session import Asked  # with Optuna, which takes a second to import

        number = max((t.number + t.replicates for t in records.trials.values()), default=0)
        which = f"run {measured + 1}" if count == 1 else f"runs {measured + 1} to {measured + count}"
        return Asked(
            number, trial.tuned, f"{which} of {name_of(trial.number)} again", trial.number, trial.parameters, count
        )

    def _refuse_failing(self, trial: Trial) -> None:
        if self._failed[trial.number] < FAILURES:
            return
        raise SetupError(
            f"{FAILURES} replicates of {name_of(trial.number)} failed for reasons of the machine; see driver.log, "
            "fix it and rerun the same command"
        )

    def report(self, number: int, evals: Sequence[Eval]) -> None:
        """Nothing: a replicate is run to its end."""

    def tell(self, record: Trial) -> None:
        """A replicate is over: say where the race stands."""
        if record.verdict is Verdict.FAILED and record.replicate_of is not None:
            self._failed[record.replicate_of] += 1
        done = replicates(self._records())
        own = {t.number: done[t.number] for t in self._field if t.number in done}
        rounds = sum(map(len, own.values())) // len(self._field)
        if rounds > self._told:
            self._told = rounds
            self._say("so far: " + "; ".join(race_words(self._study, own)))


def introduction(study: Study, field: Sequence[Trial], settings: ComparisonRules) -> str:
    """Who races, one line each."""
    text = objective_of(study).text
    lines = [f"{name_of(t.number):>10}  {text(t.objective)} in one run: {parameters_text(t)}" for t in field]
    least, most = min(settings.fewest, settings.most) * len(field), settings.most * len(field)
    runs = f"{least} to {most} runs" if least < most else counted(most, "runs")
    runs += f", equally many of each, at most {settings.most}"
    return "\n".join([*lines, f"{runs}; the sweep's own run of each, picked as the luckiest, is not counted"])


def with_seeds(study: Study, configurations: int, seeds: int) -> str:
    """The line that confirms so many configurations with ``seeds`` runs of each."""
    top = [] if configurations == TOP else ["--top", str(configurations)]
    return again("confirm", study.name, *top, "--seeds", str(seeds), *typed("confidence", "parallel", "launcher"))
