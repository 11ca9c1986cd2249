"""The grey-box sampler: separate models of samples to the target, speed and memory."""
