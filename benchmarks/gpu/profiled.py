"""A Bridge trial that prints into which functions its start went, up to ``run_start`` (``benchmarks.gpu.start_up``)."""

from __future__ import annotations

import cProfile
import pstats
import sys

from lora_tune_recipes import bridge_lora
from lora_tune_recipes.ending import end_with
from lora_tune_recipes.hand_over import hand_over

rehearse = bridge_lora.rehearse


def main() -> int:
    """Run the trial that the environment describes; returns its exit code."""
    from lora_tune_recipes.bridge import run

    profile, wait = cProfile.Profile(), run.alone_on_gpu

    def end_of_start() -> None:
        profile.disable()
        pstats.Stats(profile, stream=sys.stdout).sort_stats("cumulative").print_stats(120)
        sys.stdout.flush()
        wait()

    run.alone_on_gpu = end_of_start
    profile.enable()
    return bridge_lora.main()


def started() -> int:
    """The trial, in a warm worker where one listens; returns the exit code."""
    handed_over = hand_over("benchmarks.gpu.profiled")
    return main() if handed_over is None else handed_over


if __name__ == "__main__":
    end_with(started)
