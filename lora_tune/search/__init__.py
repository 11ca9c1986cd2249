"""What to try next: samplers, what trials taught, early stopping by comparison, races between seeds."""
