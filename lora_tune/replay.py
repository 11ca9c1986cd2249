"""``python -m lora_tune.replay --study NAME LOG...``: apply a sweep's decisions to existing logs."""

from lora_tune.cli.commands import replay as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
