"""``python -m lora_tune.schema``: the JSON schema of a study file, for editors and programs."""

from lora_tune.cli.commands import schema as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
