"""``python -m lora_tune.mcp``: a sweep as tools of a model, by the Model Context Protocol."""

from lora_tune.cli.commands import mcp as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
