"""``python -m lora_tune.logs --study NAME FILE``: show how a study reads a log, line by line."""

from lora_tune.cli.commands import logs as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
