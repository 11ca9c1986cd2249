"""Seconds to a target: as the log states them, after RCP normalisation, or what they cost in node-hours."""

from __future__ import annotations

from lora_tune.base.text import duration
from lora_tune.logs.run import Eval, RunLog
from lora_tune.search.objectives.base import Finished, Ranking
from lora_tune.store.records import Trial


class TimeToTarget(Ranking):
    """Seconds until an eval is at the target, at best."""

    has_target = True
    timed = True
    power_of_seconds = 1
    judges_evals = True
    unit = "s to the target"
    heading = "Time to target"

    @property
    def name(self) -> str:
        return f"time to {self.study.goal}"

    @property
    def nothing(self) -> str:
        return f"no trial reached {self.study.goal}"

    def text(self, value: float) -> str:
        return duration(value)

    def stop(self, run: RunLog) -> Eval | None:
        return run.reached(self.study.target)

    def measured(self, trial: Trial, run: RunLog, *, ended: bool) -> str:
        stop = self.stop(run)
        if stop is None:
            return ""
        packed = run.packed_seconds
        time = f"{stop.seconds:.1f} s" + ("" if packed is None else f" alone ({packed:.1f} s in its pack)")
        return f"{self.study.eval_words(stop)}, {time}"

    def value(self, done: Finished) -> float | None:
        return done.seconds

    def reported(self, loss: float) -> float | None:
        return loss


class MlperfScore(TimeToTarget):
    """The time to the target as MLPerf scores it: a run that converges faster than the reference is scaled back."""

    @property
    def name(self) -> str:
        return f"{super().name}, RCP-normalised"

    def value(self, done: Finished) -> float | None:
        score = done.metrics.mlperf_score
        return done.seconds if score is None else score


class NodeHours(TimeToTarget):
    """What a trial that reached its goal cost: node-hours of all its attempts, start-up included."""

    has_target = True
    timed = False
    unit = "node-hours"
    heading = "Node-hours"

    @property
    def name(self) -> str:
        return f"node-hours to {self.study.goal}" if self.study.objective.target is not None else "node-hours"

    def text(self, value: float) -> str:
        return self.scalar(value)

    def value(self, done: Finished) -> float | None:
        return done.metrics.node_hours
