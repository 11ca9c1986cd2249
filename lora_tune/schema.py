"""``python -m lora_tune.schema``: print the JSON schema of a study file."""

from lora_tune.cli.commands import schema as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
