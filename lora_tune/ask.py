"""``python -m lora_tune.ask --study NAME``: the next trial, for the caller to run."""

from lora_tune.cli.commands import ask as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
