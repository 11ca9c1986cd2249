"""Default noise between runs of one configuration, used until a sweep has repeats.

Standard deviations of logarithms, from MLPerf's public runs; ``search.noise`` updates them with a sweep's own runs.
"""

SEED_SD = 0.046
"""Of the samples at which a run's fitted curve crosses the target (GBS 8, with the curves' fixed shape)."""

READING_SD = 0.06
"""Of the samples to target from a single run's evals: ``SEED_SD`` plus the noise of evals."""

STOP_SD = 0.067
"""Of the samples at the first eval at the target: 212 of 3,150 at GBS 8; 0.029 to 0.08 in other benchmarks
(``mlperf.benchmark.STOP_CV``)."""

CURVE_SECONDS_SD = 0.05
"""Of seconds by the fitted curve: ``SEED_SD`` plus eval steps."""

SPEED_SD = 0.002
"""Of samples/s in a warm block: 0.14% between runs, and 0.5% of evals."""

PACE_SD = 0.03
"""Of seconds for the same samples, between runs of equal work on unmonitored machines."""
