"""``python -m lora_tune.confirm --study NAME``: more seeds of the leading trials, until one is shown to be better."""

from lora_tune.cli.commands import confirm as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
