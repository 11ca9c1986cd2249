"""``python -m lora_tune.score [--ruleset R] FOLDER...``: what MLPerf's rules say of result folders, side by side."""

from lora_tune.cli.commands import score as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
