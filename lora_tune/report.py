"""``sweeps/NAME/report.html``: one self-contained file that says what a sweep found."""

from lora_tune.cli.commands import report as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
