import os
import sys
from pathlib import Path

sys.path.insert(0, os.environ["STANDIN_ROOT"])
from tests.standins.mllog_training import main

main(Path(__file__).parent, "llama2_70b_lora")
