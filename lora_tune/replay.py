"""``python -m lora_tune.replay --study NAME LOG...``: what a sweep would have made of logs that exist already."""

from lora_tune.cli.commands import replay as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
