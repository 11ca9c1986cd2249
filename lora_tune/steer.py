"""``python -m lora_tune.steer --study NAME``: enqueue, stop, pause, or change the budget of a running sweep."""

from lora_tune.cli.commands import steer as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
