"""``python -m lora_tune.report --study NAME``: write ``sweeps/NAME/report.html``."""

from lora_tune.cli.commands import report as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
