"""``python -m lora_tune.sweep --study NAME``: tune a study, or go on with it."""

from lora_tune.cli.sweep import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
