"""``python -m lora_tune.tell --study NAME``: report the result of a trial handed out by ask."""

from lora_tune.cli.commands import tell as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
