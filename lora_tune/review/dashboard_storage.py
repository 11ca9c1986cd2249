"""What optuna-dashboard is given to read: the sweep's records as Optuna's trials, and never written to.

Optuna lets nobody add attributes or artifacts to a finished trial, and the driver is the only writer. So nothing is
stored twice: trials, notes, attributes with units, files and figures are made from the sweep's records when they are
read, for open trials as for finished ones. Optuna's tables are asked for the study alone: to read thousands of trials
out of them takes seconds.
"""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable, Container
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

import optuna
from optuna.artifacts.exceptions import ArtifactNotFound
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from lora_tune.base.text import redact
from lora_tune.config.study import Study
from lora_tune.review import notes
from lora_tune.review.figures import charts
from lora_tune.review.plotly import figure
from lora_tune.review.summary import overview_without_recommendation
from lora_tune.search.objectives import objectives_of
from lora_tune.search.recommendation import Recommended, best_run, is_worked_out, recommend
from lora_tune.search.recorded import curve_of, space_of, trial_at
from lora_tune.store.port import SWEEP
from lora_tune.store.records import StudyRecords, Trial
from lora_tune.store.records import TrialState as OurState

# What a sweep hands over, worked out beside the dashboard's requests: of 2,000 trials it takes seconds.


GRACE_SECONDS = 0.5
"""How long a request waits for it: of some dozens of trials the first answer is whole."""


class RecommendationInBackground:
    """One thread at a time works out the recommendation; requests get the newest there is."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._lock = threading.Lock()
        self._work: Future[Recommended | None] | None = None
        self._newest: Recommended | None = None

    def of(self, sweep: StudyRecords) -> tuple[Recommended | None, bool]:
        """What is recommended as far as it is known, and whether that is by all trials of ``sweep`` that have ended.

        Raises what working it out raised.
        """
        if not is_worked_out(sweep):
            try:
                self._newest = self._begun(sweep).result(GRACE_SECONDS)
            except TimeoutError:
                return self._newest, False
        if is_worked_out(sweep):
            self._newest = recommend(self._study, sweep)
        return self._newest, is_worked_out(sweep)

    def _begun(self, sweep: StudyRecords) -> Future[Recommended | None]:
        """The work at hand, or, where none is, that on this sweep."""
        with self._lock:
            if self._work is None or self._work.done():
                work: Future[Recommended | None] = Future()
                threading.Thread(target=self._do, args=(work, sweep), daemon=True).start()
                self._work = work  # a thread that could not be started is tried again by the next request
            return self._work

    def _do(self, work: Future[Recommended | None], sweep: StudyRecords) -> None:
        try:
            work.set_result(recommend(self._study, sweep))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the request that waits for it raises it
            work.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


FRESH_SECONDS = 5.0
"""How old the records may be that a request is answered from."""

_FIRST_ID = 1
"""The id of trial 0, as in a database of Optuna's that holds nothing else."""

LARGEST_FILE = 2 * 1024 * 1024
"""Bytes of a longer file that are shown, from its end."""


class ReadOnlyError(RuntimeError):
    """Somebody tried to change the study through the dashboard."""


class Snapshot:
    """The sweep, at most ``FRESH_SECONDS`` old. load: reads what is new since the sweep that it is given."""

    def __init__(self, study: Study, root: Path, load: Callable[[StudyRecords | None], StudyRecords]) -> None:
        self.study, self.root, self._load = study, root, load
        self._lock = threading.Lock()
        self._read_at = -FRESH_SECONDS
        self._sweep: StudyRecords | None = None

    def sweep(self) -> StudyRecords:
        """The records; one thread reads them anew, the others wait for it."""
        with self._lock:
            if self._sweep is None or time.monotonic() - self._read_at > FRESH_SECONDS:
                self._sweep = self._load(self._sweep)
                self._read_at = time.monotonic()
            return self._sweep


class DashboardStorage(optuna.storages.BaseStorage):
    """An Optuna storage that shows one study: what ``inner`` says of it, and the sweep's trials; no change is taken."""

    def __init__(self, inner: optuna.storages.BaseStorage, snapshot: Snapshot, steer: str = "") -> None:
        """steer: the command line that steers the sweep; "" shows none."""
        self._inner, self._snapshot, self._steer = inner, snapshot, steer
        self._study_id = inner.get_study_id_from_name(snapshot.study.name)
        self._space = space_of(snapshot.study)
        self._dressed: dict[int, tuple[Trial, FrozenTrial]] = {}
        self._notes: dict[int, str] = {}
        self._recommendation = RecommendationInBackground(snapshot.study)
        self._drawn: tuple[StudyRecords | None, dict[str, str]] = (None, {})

    def get_all_studies(self) -> list[FrozenStudy]:
        """The one study under review, its figures among its system attributes."""
        return [
            FrozenStudy(
                study_name=self._snapshot.study.name,
                direction=None,
                directions=self.get_study_directions(self._study_id),
                user_attrs=self.get_study_user_attrs(self._study_id),
                system_attrs=self.get_study_system_attrs(self._study_id),
                study_id=self._study_id,
            )
        ]

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """Optuna's own and the figures, under the keys that optuna-dashboard reads.

        Not the notes: optuna-dashboard looks through all attributes for each trial, which took 3 s of a
        request for 2,000 trials. See :meth:`note`.
        """
        study, sweep = self._snapshot.study, self._snapshot.sweep()
        now = time.time()
        attributes = dict(self._inner.get_study_system_attrs(study_id))
        names = [f"{o.name} (s)" if o.timed else f"{o.name} ({o.unit})" for o in objectives_of(study)]
        attributes |= {"dashboard:objective_names": names}
        return attributes | self._figures(study, sweep, now)

    def _figures(self, study: Study, sweep: StudyRecords, now: float) -> dict[str, str]:
        """The figures as attributes, made anew only when the records have changed."""
        drawn, attributes = self._drawn
        if drawn is not sweep:
            figures = charts(study, sweep, now)
            attributes = {f"dashboard:plot_data:{name}:0": json.dumps(figure(chart)) for name, chart in figures.items()}
            self._drawn = (sweep, attributes)
        return attributes

    def note(self, number: int) -> str:
        """The note of a trial that was read before, with the lines that steer it; of SWEEP, that of the sweep."""
        if number == SWEEP:
            study, sweep = self._snapshot.study, self._snapshot.sweep()
            seen = overview_without_recommendation(study, sweep, time.time())
            recommended, whole = self._recommendation.of(sweep)
            facts = notes.study_note(study, sweep, replace(seen, recommended=recommended), whole=whole)
            return facts + notes.steering_note(self._steer, SWEEP, open_=True)
        facts = self._notes.get(number, "")
        trial = self._snapshot.sweep().trials.get(number)
        open_ = trial is None or trial.state is not OurState.FINISHED
        return facts + notes.steering_note(self._steer, number, open_=open_)

    def number_of(self, trial_id: int) -> int | None:
        """A trial's number by the id that it has here; None where there is no such trial."""
        number = trial_id - _FIRST_ID
        return number if 0 <= number < self._snapshot.sweep().next_number else None

    def get_all_trials(
        self,
        study_id: int,
        deepcopy: bool = True,  # Optuna's name; these trials are copies already
        states: Container[TrialState] | None = None,
    ) -> list[FrozenTrial]:
        """The trials with attributes for people, and their files as artifacts."""
        sweep = self._snapshot.sweep()
        trials = [self._dress(sweep, number) for number in range(sweep.next_number)]
        return trials if states is None else [trial for trial in trials if trial.state in states]

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        """The best run that more seeds have not passed over. Raises ValueError where no trial has a result."""
        sweep = self._snapshot.sweep()
        if (best := best_run(self._snapshot.study, sweep)) is None:
            raise ValueError("no trial has a result")
        return self._dress(sweep, best.number)

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """One trial, dressed. Raises KeyError where there is none."""
        if (number := self.number_of(trial_id)) is None:
            raise KeyError(f"no trial has the id {trial_id}")
        return self._dress(self._snapshot.sweep(), number)

    def _dress(self, sweep: StudyRecords, number: int) -> FrozenTrial:
        """A trial that has ended is dressed once, and again when more seeds have said something of it."""
        trial, known = sweep.trials.get(number), self._dressed.get(number)
        if known is not None and known[0] == trial:
            return known[1]
        plain = trial_at(self._snapshot.study, sweep, number, self._space)
        plain._trial_id = number + _FIRST_ID
        if trial is None:
            self._notes[number] = "The sweep has no record of it.\n"
            return plain
        study, now = self._snapshot.study, time.time()
        files = [f for a in sweep.attempts_of(number) for f in notes.artifacts(self._snapshot.root, a)]
        meta = {f"artifacts:{f.id}": json.dumps(_meta(f)) for f in files}
        links = {f.name: f"/artifacts/{self._study_id}/{plain._trial_id}/{f.id}" for f in files}
        dressed = FrozenTrial(
            number=number,
            state=plain.state,
            value=None,
            # Optuna gives a pruned trial its last eval loss as its value; among seconds that would look like a record.
            values=plain.values if plain.state is TrialState.COMPLETE else None,
            datetime_start=plain.datetime_start,
            datetime_complete=plain.datetime_complete,
            params=plain.params,
            distributions=plain.distributions,
            user_attrs=notes.attributes(study, sweep, trial, now),
            system_attrs={**plain.system_attrs, **meta},
            intermediate_values=cast("dict[int, float]", curve_of(plain)),  # a page takes 0.25 as a step
            trial_id=plain._trial_id,
        )
        self._notes[number] = notes.trial_note(study, sweep, trial, links, now)
        if trial.state is OurState.FINISHED:
            self._dressed[number] = (trial, dressed)
        return dressed

    def get_study_id_from_name(self, study_name: str) -> int:
        return self._inner.get_study_id_from_name(study_name)

    def get_study_name_from_id(self, study_id: int) -> str:
        return self._inner.get_study_name_from_id(study_id)

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        return self._inner.get_study_directions(study_id)

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        return self._inner.get_study_user_attrs(study_id)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ReadOnlyError("this dashboard is read-only; only the sweep's driver writes")

    create_new_study = delete_study = set_study_user_attr = set_study_system_attr = _refuse
    create_new_trial = set_trial_param = set_trial_state_values = set_trial_intermediate_value = _refuse
    set_trial_user_attr = set_trial_system_attr = _refuse


class SweepFiles:
    """Optuna's artifact store over the sweep's own folder: the files of attempts as they lie, nothing copied."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def open_reader(self, artifact_id: str) -> BinaryIO:
        """The file's text with secrets hidden, of a long one its end. Raises ArtifactNotFound."""
        trial, _, rest = artifact_id.partition("-")
        number, _, _ = rest.partition("-")
        try:
            attempt = self._snapshot.sweep().attempts[int(trial, 16), int(number, 16)]
        except (KeyError, ValueError) as error:
            raise ArtifactNotFound(f"no attempt has a file {artifact_id}") from error
        for file in notes.artifacts(self._snapshot.root, attempt):
            if file.id == artifact_id:
                return io.BytesIO((notes.diagnosis(attempt) if file.path is None else shown(file.path)).encode())
        raise ArtifactNotFound(f"trial {attempt.trial}, attempt {attempt.number} has no file {artifact_id}")

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ReadOnlyError("this dashboard only shows files")

    write = remove = _refuse


def shown(path: Path) -> str:
    """A file's text for people: its last ``LARGEST_FILE`` bytes, secrets hidden, bytes that are no text replaced."""
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - LARGEST_FILE))
        text = redact(file.read().decode("utf-8", "replace"))
    return text if size <= LARGEST_FILE else f"[the last {LARGEST_FILE} of {size} bytes]\n{text}"


def _meta(file: notes.Artifact) -> dict[str, Any]:
    """An artifact as optuna-dashboard lists it; plain text whatever it claims to be, so that no file runs."""
    return {"artifact_id": file.id, "filename": file.name, "mimetype": "text/plain; charset=utf-8", "encoding": None}
