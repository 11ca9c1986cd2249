"""MLPerf's rules for llama2_70b_lora: eval schedule, fixed values, reference convergence, score, compliance."""

from lora_tune.rules import llama31_405b
from lora_tune.rules.compliance import Compliance, run_compliance
from lora_tune.rules.division import (
    EVAL_SAMPLES,
    FIXED,
    INTERVAL_NAMES,
    SKIP_NAMES,
    TARGET,
    Violation,
    check_closed,
    eval_schedule,
    skipped_evals,
)
from lora_tune.rules.predict import Prediction, predict
from lora_tune.rules.score import (
    BENCHMARK,
    RULESET,
    RUNS,
    Reference,
    Score,
    largest_rcp,
    olympic_mean,
    reference,
    score,
)

__all__ = [
    "BENCHMARK", "EVAL_SAMPLES", "FIXED", "INTERVAL_NAMES", "RULESET", "RUNS", "SKIP_NAMES", "TARGET",
    "Compliance", "Prediction", "Reference", "Score", "Violation",
    "check_closed", "eval_schedule", "largest_rcp", "llama31_405b", "olympic_mean", "predict", "reference",
    "run_compliance", "score", "skipped_evals",
]  # fmt: skip
