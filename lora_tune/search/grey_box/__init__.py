"""The grey-box sampler: samples to the target, speed and memory learned apart."""
