"""Several ways to propose, each given trials as far as its forecasts of this study's runs were right.

Three arms. The *grey box* believes that layouts decide speed, the rest decides convergence, and that published results
are about this study. The *whole* model believes nothing of the kind: every parameter may drive both, and data say
which. Optuna's *TPE* forecasts nothing and keeps a share in case that both are wrong. Before a trial begins, both
models forecast its ln(score), and the forecast is stored with the trial; once it has ended, the odds between them move
by the ratio of the densities that they gave to what came (prequential evidence: Dawid 1984, "Statistical theory: the
prequential approach"). So a belief that does not hold here loses its trials within three to five runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from lora_tune.search.advantage import Advantage, Weighed, heard
from lora_tune.search.forecasts import FORECASTS, judged, newest_told
from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.grey_box.memory_risk import likeliest_to_live
from lora_tune.search.grey_box.sampler import GreyBoxSampler
from lora_tune.search.incumbent import Compare, IncumbentChoice, choose, on_layout_of
from lora_tune.search.optuna_trials import TrialReader, annotate, usual_init_seconds
from lora_tune.search.proposed import Proposed
from lora_tune.search.sentences import TO_BE_SURE, expectation, staying, why_proposed
from lora_tune.search.tpe import WindowedTPESampler
from lora_tune.search.trust import GREY_BOX, NEWEST, WHOLE, ScoreForecast, Told, Trust, trust
from lora_tune.search.whole.encoding import Encoding
from lora_tune.search.whole.model import Scales, WholeModel, learn_whole
from lora_tune.search.whole.proposals import WholeProposal, believed_best, propose, recommend_whole
from lora_tune.search.whole.runs import Run, runs_of

REPLAYED = 6
"""Newest trials that are forecast anew where their forecasts were not kept."""
SLIGHT = 0.05
"""Share of the belief below which a model is not asked what is handed over."""
PER_PARAMETER, MOST_FIRST = 2, 6
"""Runs that reached the target before the whole model proposes, for each parameter and at most, where nothing says
where the user stands: of two runs it saw one slope, and stayed beside the better one on a ridge."""

Space = Mapping[str, BaseDistribution]


@dataclass(frozen=True, kw_only=True)
class Arms:
    """Who proposes. grey_box: None where there is neither a layout nor anything published to believe in."""

    grey_box: GreyBoxSampler | None
    tpe: WindowedTPESampler


class PortfolioSampler(BaseSampler):
    """Proposes by the arm that earned it. Trials record the attributes in :mod:`lora_tune.search.observations`.

    Parameters
    ----------
    coordinates : Coordinates
        The tuned parameters and their roles, stated or guessed.
    arms : Arms
        Who proposes beside the whole model.
    target : float
        Eval loss to reach.
    nodes, limit_seconds : int, float
        Of one trial.
    centre : mapping, optional
        Tuned values of what the user has today.
    stated : frozenset of str
        Parameters whose role the study says: it is not tested.
    seed : int, optional
        Of the choice between arms and of candidates.
    """

    def __init__(
        self, coordinates: Coordinates, arms: Arms, *, target: float, nodes: int = 1, limit_seconds: float = math.inf,
        centre: Mapping[str, Any] | None = None, stated: frozenset[str] = frozenset(), seed: int | None = None,
    ) -> None:  # fmt: skip
        self._space = dict(coordinates.distributions)
        self._encoding, self._reader = Encoding(self._space, coordinates), TrialReader(frozenset(self._space), target)
        self._arms, self._target = arms, target
        self._nodes, self._limit = nodes, limit_seconds
        whole = centre is not None and centre.keys() >= self._space.keys()
        self._centre = {n: centre[n] for n in self._space} if whole and centre is not None else None
        self._stated = stated
        self._rng = np.random.default_rng(seed)
        self._scales: Scales | None = None
        self._replays: dict[tuple[str, int, int], Told | None] = {}

    def reseed_rng(self) -> None:
        """Fresh randomness for a worker process."""
        self._rng = np.random.default_rng()
        self._arms.tpe.reseed_rng()
        if self._arms.grey_box is not None:
            self._arms.grey_box.reseed_rng()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All parameters."""
        return dict(self._space)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The proposal of the arm whose turn it is; ``why``, ``kind`` and the forecasts become attributes."""
        if not search_space:
            return {}
        model = self._model(study, skip=trial.number)
        values = self._proposed(study, trial, search_space, model)
        if values:
            said = {name: [f.mean, f.sd] for name, f in self._forecasts(study, trial.number, model, values).items()}
            annotate(study, trial, **{FORECASTS: json.dumps(said)})
        return values

    def _proposed(
        self, study: optuna.Study, trial: FrozenTrial, space: dict[str, BaseDistribution], model: WholeModel
    ) -> dict[str, Any]:
        choice = self._choice_now(study, model)
        odds, grey_box = self.trust_in(study), self._arms.grey_box
        if choice is not None and grey_box is not None and odds.believes_grey_box and grey_box.probes:
            unsure = choice.unsure_of_memory(partial(grey_box.alike, study))
            if unsure is not None:
                annotate(study, trial, why=TO_BE_SURE, kind="probe")
                return dict(unsure)
        turn = self._rng.random()
        if grey_box is not None and turn < odds.grey_box:
            proposed = grey_box.proposal(study, space, skip=trial.number)
            if proposed is None:
                return grey_box.sample_relative(study, trial, space)
            return self._most_worth(study, trial, choice, proposed)
        reached = sum(math.isfinite(r.ln_score) for r in model.runs)
        begun = reached >= (min(MOST_FIRST, PER_PARAMETER * len(self._space)) if self._centre is None else 1)
        if not begun or turn < odds.grey_box + odds.tpe:
            why = "to find out what reaches the target" if not begun else "in case the models are wrong"
            annotate(study, trial, why=f"Optuna's TPE, {why}", kind="full")
            return likeliest_to_live(model.memory, lambda: self._arms.tpe.sample_relative(study, trial, space))
        proposal = self._proposal(model, study)
        hours = proposal.seconds * self._nodes / 3600
        action = Proposed(proposal.values, "full", proposal.shown / hours, why_proposed(proposal, self._nodes))
        return self._most_worth(study, trial, choice, action)

    def _most_worth(
        self, study: optuna.Study, trial: FrozenTrial, choice: IncumbentChoice | None, proposed: Proposed
    ) -> dict[str, Any]:
        """What was proposed, or a further run that may decide what is handed over where that is worth more."""
        decides = choice.deciding(study.get_trials(deepcopy=False), partial(self._hours, study)) if choice else None
        proposed = decides if decides is not None and decides.rate > proposed.rate else proposed
        annotate(study, trial, why=proposed.why, kind=proposed.kind)
        return proposed.values

    def _choice_now(self, study: optuna.Study, model: WholeModel) -> IncumbentChoice | None:
        """The same by the models that propose, whose scales may be some runs old."""
        if (grey_box := self._believed(study)) is not None:
            return self._choice(study, grey_box.best_so_far(study))
        best = believed_best(model)
        return self._choice(study, best) if best is not None else None

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """What TPE has no model for yet, it draws at random."""
        return self._arms.tpe.sample_independent(study, trial, param_name, param_distribution)

    def expected_gain(self, study: optuna.Study) -> float | None:
        """Share of the score by which the next node-hour is expected to improve the recommendation; None before a run
        has reached the target."""
        if (grey_box := self._believed(study)) is not None:
            return grey_box.expected_gain(study)
        model = self._model(study)
        if not any(math.isfinite(r.ln_score) for r in model.runs):
            return None
        proposal = self._proposal(model, study)
        return -math.expm1(-max(0.0, proposal.gain * 3600 / (proposal.seconds * self._nodes)))

    def recommend(self, study: optuna.Study) -> tuple[dict[str, Any], float, str]:
        """The configuration believed best by the model that is trusted: values, expected seconds, a sentence.

        What the user has today stays, unless its run has failed here, until another is clearly better.
        Raises ValueError while nothing is known that could be recommended.
        """
        best = self._believed_best(study)
        choice = self._choice(study, best[0])
        if choice is None or choice.replaced or choice.over is None:
            return best
        sentence = staying(best[1], choice.over.likeliest, moved=choice.held != choice.start)
        return dict(choice.held), self._expected_seconds(study, choice.held), sentence

    def _choice(self, study: optuna.Study, best: Mapping[str, Any]) -> IncumbentChoice | None:
        """How what is believed best stands beside what the user has today; None where that does not count."""
        start = self._centre
        if start is None or not any(
            r.values == start and (r.open or math.isfinite(r.ln_score)) for r in self._runs(study)
        ):
            return None
        moved = on_layout_of(self._encoding.coordinates, start, best) if self._arms.grey_box is not None else start
        return choose(start, moved, best, self._comparer(study))

    def _comparer(self, study: optuna.Study) -> Compare:
        """What compares two configurations by both models, as often as that was looked at."""
        looks, odds = len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))), self.trust_in(study)
        grey_box, model = self._arms.grey_box, self._model(study)
        reached = any(math.isfinite(r.ln_score) for r in model.runs)

        def compared(values: Mapping[str, Any], other: Mapping[str, Any]) -> Weighed | None:
            parts: list[tuple[float, Advantage]] = []
            if grey_box is not None and odds.grey_box >= SLIGHT:
                parts += [(odds.grey_box, a) for a in grey_box.compared(study, values, [other])]
            if odds.grey_box <= 1 - SLIGHT and reached:
                parts.append((1 - odds.grey_box, model.compared(values, other)))
            counted = [(share, replace(a, looks=looks)) for share, a in parts]
            return heard(counted, model.scores(values), model.scores(other)) if counted else None

        return compared

    def _believed(self, study: optuna.Study) -> GreyBoxSampler | None:
        """The grey box while it is the model that is trusted."""
        return self._arms.grey_box if self.trust_in(study).believes_grey_box else None

    def _expected_seconds(self, study: optuna.Study, values: Mapping[str, Any]) -> float:
        if (grey_box := self._believed(study)) is not None:
            return math.exp(grey_box.forecast(study, values)[0])
        return math.exp(float(self._model(study).predict([values])[0][0]))

    def _hours(self, study: optuna.Study, values: Mapping[str, Any]) -> float:
        return (self._expected_seconds(study, values) + usual_init_seconds(study)) * self._nodes / 3600

    def _believed_best(self, study: optuna.Study) -> tuple[dict[str, Any], float, str]:
        if (grey_box := self._believed(study)) is not None:
            return grey_box.recommend(study)
        best = recommend_whole(self._model(study), np.random.default_rng(0))
        if best is None:
            if self._arms.grey_box is None:
                raise ValueError("no run has reached the target yet, so there is nothing to recommend")
            return self._arms.grey_box.recommend(study)
        return dict(best.values), best.score, expectation(best)

    def compared(
        self, study: optuna.Study, values: Mapping[str, Any], instead: Sequence[Mapping[str, Any]]
    ) -> list[Advantage]:
        """What the trusted model believes of ``values`` beside each of ``instead``; nothing before one has reached."""
        if (grey_box := self._believed(study)) is not None:
            return grey_box.compared(study, values, instead)
        model = self._model(study)
        reached = any(math.isfinite(r.ln_score) for r in model.runs)
        return [model.compared(values, other) for other in instead] if reached else []

    def _runs(self, study: optuna.Study, skip: int = -1) -> list[Run]:
        return runs_of(study.get_trials(deepcopy=False), self._reader.read, skip=skip)

    def _model(self, study: optuna.Study, skip: int = -1) -> WholeModel:
        grey_box = self._arms.grey_box
        model = learn_whole(
            self._encoding, self._runs(study, skip), self._scales, stated=self._stated, centre=self._centre,
            memory=grey_box.memory(study, skip) if grey_box is not None else None,
        )  # fmt: skip
        self._scales = model.scales
        return model

    def _proposal(self, model: WholeModel, study: optuna.Study) -> WholeProposal:
        return propose(model, self._rng, init_seconds=usual_init_seconds(study), limit_seconds=self._limit)

    def trust_in(self, study: optuna.Study) -> Trust:
        """The share of the next trials that each arm is given now."""
        newest = newest_told(study.get_trials(deepcopy=False), self._target, NEWEST)
        return trust(newest or self._replayed(study), grey_box=self._arms.grey_box is not None)

    def _replayed(self, study: optuna.Study) -> list[Told]:
        """What both models would have forecast of the newest trials: records of a sweep keep no forecasts."""
        ended = [t for t in study.get_trials(deepcopy=False) if t.state is not TrialState.RUNNING and t.params]
        if self._arms.grey_box is None or len(ended) < 2:
            return []
        replayed, before = [], optuna.create_study(direction="minimize")
        scales: Scales | None = None
        for at in range(max(1, len(ended) - REPLAYED), len(ended)):
            key = (study.study_name, at, ended[at].number)  # trials never reopen: those before it stay the same
            if key not in self._replays:
                before.add_trials(ended[len(before.get_trials(deepcopy=False)) : at])
                runs = self._runs(before)
                model = learn_whole(self._encoding, runs, scales, stated=self._stated, centre=self._centre)
                scales = model.scales
                forecasts = self._forecasts(before, -1, model, ended[at].params)
                self._replays[key] = judged(ended[at], self._target, forecasts)
            replayed.append(self._replays[key])
        return [t for t in replayed if t is not None]

    def _forecasts(
        self, study: optuna.Study, number: int, model: WholeModel, values: Mapping[str, Any]
    ) -> dict[str, ScoreForecast]:
        mean, sd = model.predict([values])
        forecasts = {WHOLE: ScoreForecast(float(mean[0]), math.hypot(float(sd[0]), model.forecast_sd))}
        if self._arms.grey_box is not None:
            mean_sd = self._arms.grey_box.forecast(study, values, skip=number)
            forecasts[GREY_BOX] = ScoreForecast(*mean_sd)
        return forecasts
