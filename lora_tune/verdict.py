"""``python -m lora_tune.verdict --study NAME``: which configurations are better than the baseline."""

from lora_tune.cli.commands import verdict as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
