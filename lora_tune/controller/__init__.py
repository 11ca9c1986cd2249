"""The loop that drives a sweep, and what it decides of each trial."""
