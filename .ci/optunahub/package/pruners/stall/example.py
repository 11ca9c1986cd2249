"""A curve that falls as its rate allows: bad rates are pruned once good ones have shown how a good curve looks."""

import math

import optuna
import optunahub


def objective(trial: optuna.Trial) -> float:
    rate, loss = trial.suggest_float("rate", 0.01, 1.0, log=True), 1.0
    for step in range(1, 31):
        loss = 0.1 + 0.9 * math.exp(-rate * step)
        trial.report(loss, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return loss


if __name__ == "__main__":
    stall = optunahub.load_module("pruners/stall").StallPruner
    study = optuna.create_study(pruner=stall(target=0.2, max_steps=30))
    study.optimize(objective, n_trials=40)
    print({state: len(study.get_trials(states=[state])) for state in optuna.trial.TrialState})
