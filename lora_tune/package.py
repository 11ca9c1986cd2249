"""``python -m lora_tune.package``: make an MLPerf submission package of confirmed runs and run MLPerf's checkers."""

from lora_tune.cli.commands import package as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
