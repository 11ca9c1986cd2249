"""A trial whose accuracy rises, in the log form of MLPerf's rgat: LR says how fast, EVERY the seconds of an eval."""

from __future__ import annotations

import json
import os
import time

GAIN, EVERY = float(os.environ["LR"]), float(os.environ.get("EVERY", "0.05"))


def say(key: str, value: object = None, **metadata: object) -> None:
    record = {"namespace": "", "time_ms": round(time.time() * 1000), "event_type": "POINT_IN_TIME", "key": key}
    print(":::MLLOG " + json.dumps({**record, "value": value, "metadata": {"file": "t", "lineno": 1, **metadata}}))


say("init_start")
for key, value in {
    "submission_benchmark": "rgat", "global_batch_size": 100, "train_samples": 10_000, "opt_base_learning_rate": GAIN,
    "seed": int(os.environ["SEED"]),
}.items():  # fmt: skip
    say(key, value)
say("init_stop")
say("run_start")
accuracy = 0.5
for number in range(1, 21):
    time.sleep(EVERY)
    accuracy += (0.75 - accuracy) * GAIN
    say("eval_accuracy", accuracy, epoch_num=number * 0.05)
    if accuracy >= 0.72:
        break
say("run_stop", status="success" if accuracy >= 0.72 else "aborted")
