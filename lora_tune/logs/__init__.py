"""Parsing of logs: readers of each format, the parsed run, failure diagnosis."""
