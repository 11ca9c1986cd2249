import os
import sys
from pathlib import Path

sys.path.insert(0, os.environ["STANDIN_ROOT"])
from tests.standins.failures import TEXTS, applies

absent = [path for path in sys.argv[1:] if not Path(path).is_dir()]
if absent or applies("mount"):
    raise RuntimeError(TEXTS["mount"].removeprefix("RuntimeError: ") if not absent else f"mount check failed: {absent}")
