"""``python -m lora_tune.sweep --study NAME``: tune a study, or go on with it."""

from lora_tune.cli.commands import sweep as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
