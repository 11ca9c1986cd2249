"""``python -m lora_tune.package``: confirmed runs as a submission package of MLPerf, checked by MLPerf's checkers."""

from lora_tune.cli.commands import package as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
