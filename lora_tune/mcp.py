"""``python -m lora_tune.mcp``: serve a sweep's tools to a model (Model Context Protocol)."""

from lora_tune.cli.commands import mcp as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
