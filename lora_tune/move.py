"""``python -m lora_tune.move --study NAME --to URL``: a sweep's records in another database."""

from lora_tune.commands.move import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
