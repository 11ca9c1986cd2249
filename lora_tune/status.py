"""``python -m lora_tune.status --study NAME``: where a sweep stands. Reads only; any number may watch, anywhere."""

from lora_tune.cli.commands import status as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
