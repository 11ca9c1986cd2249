"""``python -m lora_tune.sweep --study NAME``: start or resume a sweep."""

from lora_tune.cli.commands import sweep as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
