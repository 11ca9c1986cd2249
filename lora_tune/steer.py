"""``python -m lora_tune.steer --study NAME``: ask something of a sweep that runs."""

from lora_tune.cli.commands import steer as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
