"""``python -m lora_tune.init COMMAND``: a first study file for a script of one's own."""

from lora_tune.cli.commands import init as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
