"""The loop that drives a sweep, and its decisions on each trial."""
