"""``sweeps/NAME/report.html``: one self-contained file that says what a sweep found."""

from lora_tune.cli.report import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
