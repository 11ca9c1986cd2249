"""MLPerf's rules for llama2_70b_lora: eval schedule, fixed values, reference convergence, score, compliance."""

from lora_tune.mlperf import llama31_405b
from lora_tune.mlperf.compliance import Compliance, run_compliance
from lora_tune.mlperf.division import (
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
from lora_tune.mlperf.predict import Prediction, predict
from lora_tune.mlperf.score import (
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
