"""``python -m lora_tune.init COMMAND``: write a first study file for the user's own script."""

from lora_tune.cli.commands import init as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
