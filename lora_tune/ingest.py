"""``python -m lora_tune.ingest --study NAME SOURCE...``: read old runs into a study as prior observations."""

from lora_tune.cli.commands import ingest as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
