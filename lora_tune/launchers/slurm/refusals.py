"""What sbatch says when it takes no job: which answers last, and what fixes them. Pure functions.

The words are those of slurm_errno.c and of sbatch's own option parser, the same from Slurm 21.08 to 25.05.
"""

from __future__ import annotations

import re

from lora_tune.base.errors import LauncherError, RefusedError

_PASSING = re.compile(
    r"(?i)unable to contact slurm|timed out|connect(?:ion)? (?:failure|refused|reset)|no route to host|"
    r"temporarily|zero bytes were transmitted|unexpected message|missing socket|message (?:send|receive) failure|"
    r"controller .{0,40}(?:busy|standby|backup|shutting)|"
    r"job violates accounting/QOS policy|"
    r"partition not available|reservation not usable now|required node not available|still in use|"
    r"unable to resolve|DNS SRV|protocol authentication error|munge"
)
"""What another try may find otherwise: a controller that is away or busy, a limit that running jobs have used up."""

WITHOUT_GRES = 'gres = "none" in [site] where the cluster knows no GPUs and nodes are taken whole'

_LASTING = (
    (r"account", "correct site.account (sacctmgr show assoc user=$USER), or site.partition, which may not admit it"),
    (r"qos", "correct site.qos (sacctmgr show assoc user=$USER format=account,qos)"),
    (r"partition|group not permitted", "correct site.partition (sinfo --summarize)"),
    (r"reservation", "correct or remove site.reservation (scontrol show reservation)"),
    (r"generic resource|\bgres\b", f"correct site.gres (sinfo --format='%N %G'); {WITHOUT_GRES}"),
    (r"node name", "correct site.nodelist and site.exclude (sinfo --Node)"),
    (r"feature|constraint", "correct the --constraint in site.sbatch_args (sinfo --format='%N %f')"),
    (r"time limit", "lower budget.trial_minutes, or take a partition that allows more (sinfo --format='%P %l')"),
    (r"license", "correct the --licenses in site.sbatch_args (scontrol show licenses)"),
    (r"dependency", "correct the --dependency in site.sbatch_args"),
    (r"unable to open file", "the script is not in the folder that the study names: workload.implementation, or cwd"),
    (r"unrecognized option|invalid --|invalid option|ambiguous", "correct site.sbatch_args (sbatch --help)"),
    (r"access/permission denied|invalid user", "ask the administrator: this user may not submit"),
)
"""Pattern of an answer that stays the same -> what fixes it."""

_PREFIX = re.compile(r"(?i)batch job submission failed: ")
_COUNTS = (
    r"(?:max|limit|too many|exceed|simultaneous|quota|cap\b|allowed|threshold|already|only|running|queued|pending|"
    r"bereits|höchstens|déjà|\b\d+\b)"
)
_JOBS = r"\b(?:jobs?|aufträge|travaux|tâches|trabajos)\b"
_OF_A_FILTER = re.compile(rf"(?i)unspecified error|{_COUNTS}.{{0,60}}{_JOBS}|{_JOBS}.{{0,60}}{_COUNTS}")
"""A site's own filter or wrapper refused it for jobs that are there: its words may speak of accounts and partitions."""

_LIMIT = re.compile(r"\b(?:QOS|Assoc)(?:Max|Min|Grp)(?!Submit|Jobs)(\w+)")
"""A limit of the QOS (its flag DenyOnLimit) that this job is beyond by itself, whatever else runs."""

_WALL_REMEDY = "lower budget.trial_minutes, or take a site.qos that allows more (sacctmgr show qos format=name,maxwall)"
_LIMIT_REMEDY = (
    "correct site.nodes and gpus_per_node, or budget.trial_minutes, or take a site.qos that allows more, or take the "
    "node count out of the space (sacctmgr show qos format=name,maxwall,maxtres,mintres)"
)

_SIZE = (
    r"(?i)node count|node configuration|more processors|memory specification|number of (?:tasks|cpus)|nodes? requested"
)
_SIZE_REMEDY = (
    "no partition has that many such nodes: correct site.nodes, gpus_per_node or gres, or take the node count out of "
    "the space (sinfo --format='%P %D %G')"
)


def refusal(job: str, answer: str) -> LauncherError:
    """What ``answer``, what sbatch said of ``job``, amounts to: RefusedError, or LauncherError where it may pass.

    An answer that is not known, of a site's own submission filter for example, is a refusal that may not last.
    """
    if limit := _LIMIT.search(answer):
        wall = limit[1].startswith("Wall")
        return RefusedError(job, answer, _WALL_REMEDY if wall else _LIMIT_REMEDY, by_size=not wall)
    if _PASSING.search(answer):
        return LauncherError(f"{job} was not submitted: {answer}")
    if re.search(_SIZE, answer):
        return RefusedError(job, answer, _SIZE_REMEDY, by_size=True)
    own = "" if _OF_A_FILTER.search(_PREFIX.sub("", answer)) else answer
    for pattern, remedy in _LASTING:
        if re.search(f"(?i){pattern}", own):
            return RefusedError(job, answer, remedy)
    return RefusedError(job, answer, "correct the study's [site], or ask the administrator", lasting=False)
