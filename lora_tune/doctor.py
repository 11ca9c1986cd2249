"""``python -m lora_tune.doctor --study NAME [--probe]``: what stands between here and the study's first trial."""

from lora_tune.cli.commands import doctor as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
