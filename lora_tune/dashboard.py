"""``python -m lora_tune.dashboard --study NAME``: the sweep in optuna-dashboard."""

from lora_tune.cli.commands import dashboard as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
