"""``python -m benchmarks.gate_agreement [COUNT] [BENCHMARK|RULESET...]``: same verdict of gate and mlp_compliance?

For each benchmark of rulesets 5.0 to 6.1 (by default all of both, COUNT 10,000 random configurations each) the gate
judges variables, and the compliance checker, called as by its command line, judges a log file with the same values. The
gate may also refuse by the text of the rules (LoRA's alpha, end rates); such cases are counted separately.

The newest round is first. Every hundredth configuration is judged by the checker with its rules read from the files and
compiled for each record; the others with rules that are compiled once.
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import yaml
from mlperf_logging.compliance_checker import mlp_compliance

from lora_tune.mlperf.benchmark import Benchmark, read_benchmark
from lora_tune.mlperf.gate import announced, check_values, keys_of, log_lines
from lora_tune.mlperf.rulesets import benchmarks_of, order, rulesets

FIRST = "5.0.0"
BY_ITSELF_EVERY = 100


def configuration(benchmark: Benchmark, rng: random.Random) -> dict[str, object]:
    """Random values for some of the variables that map to a key; half of them are what the rules demand."""
    batch = rng.choice([*benchmark.batch_sizes, rng.randint(1, 20_000)])
    variables = {key: name for name, key in keys_of(benchmark.name).items() if key != "global_batch_size"}
    demanded = benchmark.demanded({"global_batch_size": batch})
    chosen = rng.sample(sorted(variables), rng.randint(0, min(6, len(variables))))
    values: dict[str, object] = {"GBS": batch}
    for key in chosen:
        wanted = demanded.get(key)
        values[variables[key]] = wanted if wanted is not None and rng.random() < 0.5 else _random(rng)
    return values


def _random(rng: random.Random) -> float:
    return rng.choice([rng.randint(0, 20_000), 10 ** rng.uniform(-7, 4), 0, 1, 8, 16, 0.1, 0.3, 1_200_000])


def main() -> int:
    """Compare; return 1 if gate and checker disagree on any configuration."""
    logging.disable(logging.CRITICAL)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    named = set(sys.argv[2:])
    known = [r for r in reversed(rulesets()) if order(r) >= order(FIRST)]
    chosen = [r for r in known if r in named] or known
    wanted = named - set(known)
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result_0.txt"
        for ruleset in chosen:
            for name in (n for n in benchmarks_of(ruleset) if not wanted or n in wanted):
                benchmark, rng, seen = read_benchmark(name, ruleset), random.Random(f"{name} {ruleset}"), Counter[str]()
                for number in range(count):
                    seen[
                        _compare(benchmark, configuration(benchmark, rng), file, by_itself=not number % BY_ITSELF_EVERY)
                    ] += 1
                print(f"{ruleset}  {name:20} {dict(sorted(seen.items()))}", flush=True)
                total.update(seen)
    print(f"{total.total()} configurations: {dict(sorted(total.items()))}")
    return int(total["DISAGREE"] > 0)


def _compare(benchmark: Benchmark, values: dict[str, object], file: Path, *, by_itself: bool) -> str:
    said = announced(benchmark.name, values)
    file.write_text("\n".join(log_lines(benchmark, said)) + "\n", encoding="utf-8")
    refused = bool(check_values(benchmark, values))
    with patch.object(mlp_compliance, "yaml", yaml if by_itself else mlp_compliance.yaml):
        checker = mlp_compliance.make_checker("training", benchmark.ruleset, True, False)
        passes = mlp_compliance.main(str(file), f"training_{benchmark.ruleset}/common.yaml", checker)[0]
    by_text = any(said[key] != wanted for key, wanted in benchmark.by_text(said).items() if key in said)
    if passes != refused:
        return "both pass" if passes else "both refuse"
    return "gate refuses by the rules' text" if passes and by_text else "DISAGREE"


if __name__ == "__main__":
    sys.exit(main())
