"""``python -m lora_tune.explain --study NAME``: which knob matters, why a trial went as it did, what to try next."""

from lora_tune.cli.commands import explain as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
