"""The folder that ``init`` puts on a script's PYTHONPATH to record the options of the script's own parser."""
