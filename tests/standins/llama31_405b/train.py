import os
import sys
from pathlib import Path

sys.path.insert(0, os.environ["STANDIN_ROOT"])
from tests.standins.mllog_training import main

absent = [name for name in ("PREPROC_DATA", "TOKENIZER") if not Path(os.environ[name]).is_dir()]
if absent:
    raise FileNotFoundError(f"[Errno 2] No such file or directory: {', '.join(absent)}")
main(Path(__file__).parent, "llama31_405b", shrink=64, every=18_432)
