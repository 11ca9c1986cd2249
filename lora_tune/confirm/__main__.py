"""``python -m lora_tune.confirm``."""

from lora_tune.confirm import main

main()
