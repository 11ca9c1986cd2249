"""The search in stages: switches by probes, layouts, hyperparameters, confirmation (docs/search.md)."""
