"""``python -m lora_tune.status --study NAME``: where a sweep stands. Reads only; any number may watch, anywhere."""

from lora_tune.cli.status import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
