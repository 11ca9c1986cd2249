"""Figures of the convergence statistics: ``python -m benchmarks.statistics [--part NAME]``."""
