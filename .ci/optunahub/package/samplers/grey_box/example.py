"""The time of a training to its target, whose trials record nothing but their result."""

import math

import optuna
import optunahub


def seconds(trial: optuna.Trial) -> float:
    rate, batch = trial.suggest_float("LR", 1e-5, 1e-2, log=True), trial.suggest_categorical("GBS", [8, 16, 32])
    return (1 + (math.log10(rate) + 3.5) ** 2) * (100 + batch) / batch**0.8


if __name__ == "__main__":
    study = optuna.create_study(sampler=optunahub.load_module("samplers/grey_box").GreyBoxSampler(seed=1))
    study.optimize(seconds, n_trials=20)
    print(study.best_params)
