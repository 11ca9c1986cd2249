"""The folder that ``init`` puts on a script's PYTHONPATH, so that the script's own option parser says what it knows."""
