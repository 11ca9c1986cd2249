"""Search: samplers, what trials teach the models, early stopping by comparison, races between seeds."""
