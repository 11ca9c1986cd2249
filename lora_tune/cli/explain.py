"""``python -m lora_tune.explain``: parameter importance, the course of a trial, and the next proposal."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lora_tune.base.errors import InputError, LoraTuneError
from lora_tune.base.text import counted, visible
from lora_tune.cli.options import Review, load_review
from lora_tune.config.study import Study
from lora_tune.controller import conclusion, limits, pruning
from lora_tune.logs.run import Eval, TrainPoint
from lora_tune.review import importance
from lora_tune.review.advice import Advice, advise
from lora_tune.review.importance import FEWEST, Knob, cannot_tell, failing_values, knobs
from lora_tune.review.stopping import account_text, stopping_account
from lora_tune.review.summary import (
    ending_label,
    objective_text,
    parameters_text,
    prior_text,
    recommended_text,
    trial_name,
)
from lora_tune.search import pace
from lora_tune.search.capping import gain_below_threshold
from lora_tune.search.no_effect import no_effect
from lora_tune.search.objectives import objective_of
from lora_tune.search.recommendation import best_run, leaders, recommend
from lora_tune.store.records import StudyRecords, Trial, TrialState, Verdict

if TYPE_CHECKING:
    pass

LOGS_READ = 20
"""Maximum logs that are read for training losses."""

LARGEST_LOG = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """The next proposal. why: the sampler's reason, with the expected gain if known."""

    tuned: Mapping[str, Any]
    why: str
    stop: str
    """Why the driver would propose nothing; "" if it would."""
    recommended: str = ""
    """The recommendation, in the words of the other commands; "" before a trial has a result."""


def next_proposal(study: Study, sweep: StudyRecords, now: float) -> Next:
    """The sampler's next proposal given all records, computed in memory: writes and starts nothing."""
    from lora_tune.search.recorded import in_memory
    from lora_tune.search.samplers import sampler_of
    from lora_tune.search.session import expected_gain

    sampler = sampler_of(study, sweep)
    known = in_memory(study, sweep, sampler)
    stop = limits.may_propose(study, sweep, now)
    if not stop and study.budget.stop_below is not None:
        stop = gain_below_threshold(study, expected_gain(known))
    proposal = known.ask(study.search_space.distributions())
    why = proposal.user_attrs.get("why") or _sampler_reason(study, sweep, len(sweep.trials))
    space = study.search_space
    return Next(
        tuned=space.conditions.present(proposal.params),
        why=why,
        stop=stop,
        recommended=_recommended(study, sweep),
    )


def _recommended(study: Study, sweep: StudyRecords) -> str:
    if (config := recommend(study, sweep)) is None:
        return ""
    return f"{trial_name(config.trial)}, {parameters_text(config.trial)}: {recommended_text(study, config)}"


def why_proposed(study: Study, sweep: StudyRecords, trial: Trial) -> str:
    """The sampler's recorded reason, or what is known about the sampler at that time."""
    if trial.why:
        return trial.why
    if any(dict(point).items() <= dict(trial.tuned).items() for point in study.search.enqueue):
        return "the study file names this point in search.enqueue"
    return _sampler_reason(study, sweep, trial.number)


def _sampler_reason(study: Study, sweep: StudyRecords, number: int) -> str:
    from lora_tune.search.samplers import sampler_kind

    search, kind = study.search, sampler_kind(study)
    if kind.draws_always:
        return "drawn at random, as search.sampler asks"
    if kind.draws_first and number < search.startup_trials:
        return f"drawn at random: the first {search.startup_trials} are, so that the {search.sampler} model has a start"
    begin = sweep.trials[number].proposed_at if number in sweep.trials else math.inf
    ended = sum(t.finished_at is not None and t.finished_at <= begin for t in sweep.trials.values())
    basis = "1 trial that had ended" if ended == 1 else f"{ended} trials that had ended"
    return f"chosen by {search.sampler} from the results of {basis}; it tells neither why nor what it expects to gain"


def trial_story(study: Study, sweep: StudyRecords, trial: Trial) -> list[tuple[str, str]]:
    """(label, text) pairs about a trial: proposal, end, distance to the target, attempts with remedies."""
    story = [("parameters", parameters_text(trial)), ("proposed", why_proposed(study, sweep, trial))]
    ending = f"{trial.verdict}: {trial.sentence}" if trial.verdict else f"{trial.state}, not ended"
    story.append(("ended", ending))
    evals = sweep.last_evals(trial.number)
    if evals and objective_of(study).judges_evals:
        story.append(("distance", _distance(study, sweep, trial, evals)))
    if trial.verdict is Verdict.REACHED and (place := _place(study, sweep, trial)):
        story.append(("place", place))
    if slower := pace.clock_text(study, trial):
        story.append(("machine", slower))
    if paused := conclusion.pause_text(trial.metrics):
        story.append(("suspended", paused))
    for attempt in sweep.attempts_of(trial.number):
        if attempt.failure or attempt.stop_sentence not in ("", trial.sentence):
            what = ". ".join(p for p in (attempt.failure, attempt.line, attempt.stop_sentence) if p)
            remedy = f". Remedy: {attempt.remedy}" if attempt.remedy else ""
            on = f" on {', '.join(attempt.nodes)}" if attempt.nodes else ""
            story.append((f"attempt {attempt.number}", f"{what}{on}{remedy}"))
    return [(name, visible(sentence)) for name, sentence in story]


def _distance(study: Study, sweep: StudyRecords, trial: Trial, evals: Sequence[Eval]) -> str:
    """The last eval against the target, the usual curve and the pruning limit at the same samples."""
    last, target = evals[-1], study.objective.target
    sentence = study.eval_text(last)
    if target is not None:
        sentence += f", {study.shown(last.loss) - target:+.4f} against the target"
    band = pruning.band(study, sweep, trial)
    reached = [row for row in band if row[0] <= last.samples * (1 + 1e-6)]
    if not reached:
        return "; ".join(part for part in (sentence, pruning.lone_reason(study, sweep, trial)) if part)
    _, usual, limit = reached[-1]
    beyond = "below" if study.rising else "above"
    usual, limit = study.shown(usual), study.shown(limit)
    return f"{sentence}; good runs are at {usual:.4f} by then, and {beyond} {limit:.4f} a run is stopped"


def _place(study: Study, sweep: StudyRecords, trial: Trial) -> str:
    order = leaders(study, sweep)
    at = next((i for i, t in enumerate(order) if t.number == trial.number), None)
    if at is None:
        return ""
    best = order[0].objective
    ratio = trial.objective / best - 1 if best else 0.0
    seeds = f"; {ending_label(study, trial)} with more seeds" if trial.metrics.confirmed else ""
    return f"number {at + 1} of {len(order)}, {ratio:+.1%} against the best in {objective_text(study)}{seeds}"


def train_losses(review: Review) -> dict[int, Sequence[TrainPoint]]:
    """Training losses of the best and of the censored trials whose logs are on this machine."""
    from lora_tune.workloads import load as load_workload

    study, sweep = review.study, review.sweep
    workload = load_workload(study, review.file)
    censored = (t for t in sweep.trials.values() if t.verdict is Verdict.CENSORED)
    losses: dict[int, Sequence[TrainPoint]] = {}
    for trial in islice((*leaders(study, sweep)[: LOGS_READ // 2], *censored), LOGS_READ):
        attempts = sweep.attempts_of(trial.number)
        log = review.paths.root / attempts[-1].folder / "job.log" if attempts else None
        if log is None or not log.is_file() or log.stat().st_size > LARGEST_LOG:
            continue
        reader = workload.reader()
        reader.feed(log.read_bytes())
        losses[trial.number] = reader.run().train
    return losses


def run(study_name: str, storage: str | None, output: Path | None, number: int | None, as_json: bool) -> None:
    """Run ``explain``; options: cli/commands.py."""
    review = load_review(study_name, output, storage)
    if number is not None:
        _print_trial(review, number, as_json)
        return
    advice = advise(review.study, review.sweep, _train_if_possible(review))
    _print_sweep(review, advice, next_proposal(review.study, review.sweep, time.time()), as_json)


def _train_if_possible(review: Review) -> dict[int, Sequence[TrainPoint]]:
    """Training losses; empty, with a message, if the study's workload cannot be loaded on this machine."""
    try:
        return train_losses(review)
    except LoraTuneError as error:
        click.echo(f"no training losses are read: {' '.join(str(error).split())}", err=True)
        return {}


def _print_trial(review: Review, number: int, as_json: bool) -> None:
    if number not in review.sweep.trials:
        last = max(review.sweep.trials, default=None)
        numbers = "it has none" if last is None else f"there are 0 to {last}"
        raise InputError(f"--trial {number}: {review.study.name} has no such trial; {numbers}")
    story = trial_story(review.study, review.sweep, review.sweep.trials[number])
    if as_json:
        click.echo(json.dumps({"trial": number, **dict(story)}))
        return
    click.echo(f"trial {number}")
    for name, sentence in story:
        click.echo(f"  {name:<11} {sentence}")


def _print_importance(study: Study, sweep: StudyRecords, ranking: Sequence[Knob], unknown: str) -> None:
    click.echo(f"What sets the better trials apart, in {objective_text(study)}")
    for knob in ranking:
        bar = "█" * round(30 * knob.share)
        click.echo(f"  {knob.name:<20} {knob.share:>4.0%}  {bar:<30} best third: {knob.best}")
    if unknown:
        click.echo(f"  {unknown}")
    elif not ranking:
        done = len(leaders(study, sweep))
        measured = "was measured" if done == 1 else "were measured"
        what = "reached the target" if objective_of(study).has_target else measured
        click.echo(f"  {counted(done, 'trials')} {what}; the shares are meaningful from {FEWEST} on")


def _print_sweep(review: Review, advice: Sequence[Advice], ahead: Next, as_json: bool) -> None:
    study, sweep = review.study, review.sweep
    ranking, failing, unknown = knobs(study, sweep), failing_values(sweep), cannot_tell(study, sweep)
    if as_json:
        document = {"failing": [asdict(f) for f in failing], "importance": [asdict(k) for k in ranking],
                "cannot_tell": unknown, "advice": [asdict(a) for a in advice], "next": asdict(ahead),
                "priors": len(sweep.priors)}  # fmt: skip
        click.echo(json.dumps(document))
        return
    for value in failing:
        click.echo(visible(value.sentence(study)))
    _print_importance(study, sweep, ranking, unknown)
    if account := stopping_account(study, sweep, time.time()):
        click.echo(f"\nStopping\n  {account_text(account)}")
    best = best_run(study, sweep)
    for line in importance.change_lines(study, sweep, best) if best is not None else ():
        click.echo(visible(f"\n{line}" if line.startswith("trial") else line, keep="\n"))
    click.echo("\nAdvice")
    for a in advice:
        click.echo(visible(f"  {a.seen}.\n", keep="\n") + visible(f"    do:       {a.do}"))
        click.echo(visible(f"    evidence: {a.evidence}"))
    if not advice:
        click.echo("  none of the rules applies to what has been observed so far")
    if idle := no_effect(study, sweep):
        click.echo(f"\nTrouble\n  {idle.sentence}")
    if ahead.recommended:
        click.echo(f"\nRecommended now\n  {visible(ahead.recommended)}")
    click.echo("\nNext")
    if starts := prior_text(study, sweep):
        click.echo(f"  the search starts from {starts}")
    if ahead.stop and not any(t.state is not TrialState.FINISHED for t in sweep.trials.values()):
        click.echo(f"  nothing: {ahead.stop}. With more budget it would be, for example:")
    proposal = Trial(number=len(sweep.trials), seed=0, tuned=ahead.tuned, parameters={})
    click.echo(f"  {parameters_text(proposal)}\n    {visible(ahead.why)}")
