"""``python -m lora_tune.tell --study NAME``: how a trial that was asked for went."""

from lora_tune.cli.commands import tell as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
