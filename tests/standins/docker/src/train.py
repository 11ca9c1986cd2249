"""Names what the training in the image reads; the stand-in's ``run_and_time.sh`` does it in bash."""

import os

LR = float(os.environ["LR"])
NAMES = [os.environ["MAX_STEPS"], os.environ["MINIBS"], os.environ["TP"], os.environ["CP"], os.environ["PP"]]
EVALS = [os.environ["VAL_CHECK_INTERVAL"], os.environ["SKIP_EVALS"], os.environ["FP8_ACTIVATION"]]
