"""``python -m lora_tune.status --study NAME``: the state of a sweep; read only."""

from lora_tune.cli.commands import status as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
