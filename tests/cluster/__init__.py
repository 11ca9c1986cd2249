"""The project's own test cluster: real Slurm from Debian packages, started by the tests themselves."""

from tests.cluster.cluster import Cluster, ClusterError, Shape, ask_for_a_second, missing, wait_until

__all__ = ["Cluster", "ClusterError", "Shape", "ask_for_a_second", "missing", "wait_until"]
