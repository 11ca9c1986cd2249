"""``python -m lora_tune.interchange --study NAME``: all trials as CSV, Parquet, MLflow runs or TensorBoard events."""

from lora_tune.commands.interchange import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
