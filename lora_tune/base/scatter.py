"""How far runs of one configuration lie from one another, as assumed before a sweep has repeats that say it.

Standard deviations of logarithms, of MLPerf's public runs. ``search.noise`` learns a sweep's own from here.
"""

SEED_SD = 0.046
"""Of the samples at which the curve of a run crosses the target (GBS 8, by the curves' fixed shape)."""

READING_SD = 0.06
"""Of the samples that a single run names by its own evals: ``SEED_SD``, and what its evals scatter."""

STOP_SD = 0.067
"""Of the samples at which a run stops, the first eval at the target: 212 of 3,150 at GBS 8. Other benchmarks have 0.029
to 0.08 (``mlperf.benchmark.STOP_CV``)."""

CURVE_SECONDS_SD = 0.05
"""Of seconds by the fitted curve: ``SEED_SD``, and eval steps."""

SPEED_SD = 0.002
"""Of samples/s by a warm block: 0.14% between runs, and 0.5% of evals."""

PACE_SD = 0.03
"""Of seconds for the same samples, in runs of equal work on machines that nobody watches."""
