"""Whether data and model are where the training will look for them."""

import sys
from pathlib import Path

absent = [path for path in sys.argv[1:] if not Path(path).is_dir()]
if absent:
    raise RuntimeError(f"mount check failed: {', '.join(absent)} missing")
