"""Helpers of all rooms, independent of trials: errors, paths, files, text, host."""

VERSION = "0.1.0"
