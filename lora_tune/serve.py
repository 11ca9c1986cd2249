"""``python -m lora_tune.serve --storage URL``: all active studies of a database, as one process that runs for weeks."""

from lora_tune.cli.serve import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
