"""MLPerf Training's rules, read from the installed ``mlperf_logging``: benchmarks, compliance, convergence, score."""
