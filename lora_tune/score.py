"""``python -m lora_tune.score [--ruleset R] FOLDER...``: score result folders by MLPerf's rules."""

from lora_tune.cli.commands import score as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
