"""The laboratory: search methods side by side on simulated trials, by the regret of what they recommend."""
