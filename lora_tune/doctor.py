"""``python -m lora_tune.doctor --study NAME [--probe]``: check what a study needs on this cluster."""

from lora_tune.cli.commands import doctor as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
