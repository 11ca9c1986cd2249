"""What a sweep hands over, worked out beside the dashboard's requests: of 2,000 trials it takes seconds."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from lora_tune.config.study import Study
from lora_tune.search.recommendation import Recommended, is_worked_out, recommend
from lora_tune.store.records import StudyRecords

GRACE_SECONDS = 0.5
"""How long a request waits for it: of some dozens of trials the first answer is whole."""


class BeliefBesideRequests:
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
