"""``python -m lora_tune.explain --study NAME``: parameter importance, the course of a trial, and the next proposal."""

from lora_tune.cli.commands import explain as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
