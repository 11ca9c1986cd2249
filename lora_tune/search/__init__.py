"""Search: samplers, observations of trials, early stopping by comparison, races between seeds."""
