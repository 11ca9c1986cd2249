"""``python -m lora_tune.logs --study NAME FILE``: line by line, what a study reads a log as."""

from lora_tune.cli.commands import logs as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
