"""``python -m lora_tune.export --study NAME``: write the recommended configuration as ``best/config_*.sh``."""

from lora_tune.cli.commands import export as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
