"""The best trial in the form that its workload's users run by hand: ``best/config_*.sh``."""

from lora_tune.cli.commands import export as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
