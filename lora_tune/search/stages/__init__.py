"""The search in stages: switches by screening probes, layouts, hyperparameters, confirmation (docs/search.md)."""
