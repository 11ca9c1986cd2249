"""``python -m lora_tune.ingest --study NAME LOG...``: old MLLOG logs teach the search before, or while, it spends."""

from lora_tune.cli.commands import ingest as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
