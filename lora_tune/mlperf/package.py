"""A submission package of MLPerf Training: the tree of files that its package checker reads.

``SUBMITTER/systems/SYSTEM.json``, ``SUBMITTER/results/SYSTEM/BENCHMARK/result_N.txt``, and the code in
``SUBMITTER/benchmarks/BENCHMARK/implementations/NAME``. Logs are packaged unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from lora_tune.base.errors import InputError

STATUS = {
    "onprem": "Available on-premise",
    "cloud": "Available cloud",
    "preview": "Preview",
    "research": "Research, Development, or Internal (RDI)",
}
"""``submission_status`` of a log -> ``status`` of a system description (mlperf_logging, system_desc_checker)."""

FIELDS = (
    "submitter", "division", "status", "system_name", "number_of_nodes", "host_processors_per_node",
    "host_processor_model_name", "host_processor_core_count", "host_processor_vcpu_count", "host_processor_frequency",
    "host_processor_caches", "host_processor_interconnect", "host_memory_capacity", "host_storage_type",
    "host_storage_capacity", "host_networking", "host_networking_topology", "host_memory_configuration",
    "accelerators_per_node", "accelerator_model_name", "accelerator_host_interconnect", "accelerator_frequency",
    "accelerator_on-chip_memories", "accelerator_memory_configuration", "accelerator_memory_capacity",
    "accelerator_interconnect", "accelerator_interconnect_topology", "cooling", "hw_notes", "framework",
    "other_software_stack", "operating_system", "sw_notes",
)  # fmt: skip
"""Fields of a system description, in the order of ``check_system_desc``."""

MAY_BE_EMPTY = frozenset({
    "host_processor_vcpu_count", "host_processor_frequency", "host_processor_caches", "host_processor_interconnect",
    "host_networking_topology", "host_memory_configuration", "accelerator_frequency", "accelerator_on-chip_memories",
    "accelerator_memory_configuration", "accelerator_interconnect_topology", "cooling", "hw_notes", "sw_notes",
})  # fmt: skip
"""Fields that public packages leave empty."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


def described_by_logs(announced: Mapping[str, object]) -> dict[str, str]:
    """The fields of a system description that the logs state.

    announced: the logs' ``submission_org``, ``submission_division``, ``submission_status``, ``submission_platform``.
    """
    return {
        "submitter": str(announced.get("submission_org", "")),
        "division": str(announced.get("submission_division", "")),
        "status": STATUS.get(str(announced.get("submission_status", "")), ""),
        "system_name": str(announced.get("submission_platform", "")),
    }


def described_by_machine(texts: Mapping[str, str]) -> dict[str, str]:
    """The fields of a system description that can be read from the machine; unknown ones are left out.

    texts: outputs by name: ``cpuinfo``, ``meminfo``, ``os-release``, ``uname``, ``gpus`` (``nvidia-smi
    --query-gpu=name,memory.total,driver_version --format=csv,noheader``), ``infiniband`` (device names).
    """
    known = _processors(texts.get("cpuinfo", "")) | _accelerators(texts.get("gpus", ""))
    if total := re.search(r"MemTotal:\s+(\d+) kB", texts.get("meminfo", "")):
        known["host_memory_capacity"] = f"{round(int(total[1]) / 2**20)} GB"
    name = re.search(r'^PRETTY_NAME="?([^"\n]+)', texts.get("os-release", ""), re.MULTILINE)
    if name or texts.get("uname"):
        known["operating_system"] = name[1] if name else texts["uname"].strip()
    if devices := texts.get("infiniband", "").split():
        known["host_networking"] = f"{len(devices)} x RDMA ({', '.join(sorted(devices)[:4])})"
    return known


def _processors(cpuinfo: str) -> dict[str, str]:
    """From /proc/cpuinfo, which has a block for each hardware thread with its socket."""
    models = re.findall(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    sockets = set(re.findall(r"^physical id\s*:\s*(\d+)$", cpuinfo, re.MULTILINE))
    cores = re.search(r"^cpu cores\s*:\s*(\d+)$", cpuinfo, re.MULTILINE)
    known = {"host_processor_model_name": models[0].strip()} if models else {}
    if sockets and cores:
        known["host_processors_per_node"] = str(len(sockets))
        known["host_processor_core_count"] = cores[1]
        known["host_processor_vcpu_count"] = str(len(models))
    return known


def _accelerators(gpus: str) -> dict[str, str]:
    rows = [[cell.strip() for cell in row.split(",")] for row in gpus.splitlines() if row.count(",") >= 2]
    if not rows:
        return {}
    memory = re.match(r"(\d+)", rows[0][1])
    return {
        "accelerators_per_node": str(len(rows)),
        "accelerator_model_name": rows[0][0],
        "other_software_stack": f"NVIDIA driver {rows[0][2]}",
    } | ({"accelerator_memory_capacity": f"{round(int(memory[1]) / 1024)} GB"} if memory else {})


def template(known: Mapping[str, str]) -> dict[str, str]:
    """A system description with the known fields, and empty ones to fill in."""
    return {field: known.get(field, "") for field in FIELDS}


def check_description(system: Mapping[str, object], announced: Mapping[str, object], place: str) -> None:
    """Raise InputError for the first field of a system description that is empty, missing, or contradicts the logs.

    place: the description's path, for the message. announced: as for :func:`described_by_logs`.
    """
    empty = [f for f in FIELDS if f not in MAY_BE_EMPTY and not str(system.get(f, "")).strip()]
    if empty:
        raise InputError(f"{place}: nothing stands in {', '.join(empty)}; fill it in, and run this again")
    if missing := [field for field in FIELDS if field not in system]:
        raise InputError(f"{place}: lacks {', '.join(missing)}; an empty text is allowed there")
    if (status := str(system["status"])) not in STATUS.values():
        raise InputError(f"{place}: status {status!r}: allowed are {', '.join(map(repr, STATUS.values()))}")
    for field in ("submitter", "division"):
        logged = described_by_logs(announced)[field]
        if logged and str(system[field]) != logged:
            raise InputError(f"{place}: {field} is {system[field]!r}, and the logs say {logged!r}; they must agree")


REMEDIES = (
    ("occurrence of", "the trainer does not print that line, or twice: log it there as the round asks, and run again"),
    ("do not comply, directory", "score RESULTS says of each file what it lacks; such runs are made again"),
    ("accepting this under olympic scoring", "one run may fail; a second one would refuse the directory"),
    ("runs, but detected", "confirm more seeds until there are as many"),
    ("Incorrect number of files", "results are result_0.txt, result_1.txt and so on, as many as the round asks"),
    ("do not conform to naming convention", "only result_N.txt belongs there"),
    ("Unknown files in result directory", "only result_N.txt belongs there"),
    ("Skipping benchmark", "the round has no such benchmark: --ruleset names one that has it"),
    ("Seed checker failed", "every run needs a seed of its own, logged once and not 0: run the repeated ones again"),
    ("RCP Test Failed", "the runs converge too fast, or there is no reference at this batch: see the line of the RCP "
     "check below; run again with a learning rate or batch nearer to the reference's"),
    ("RCP test FAILED", "as RCP Test Failed"),
    ("did not converge", "the run counts as infinite; one of a submission may"),
    ("Batch sizes in files do not match", "package the runs of one configuration"),
    ("Benchmark names in files do not match", "package the runs of one benchmark"),
    ("ystem description", "correct the field that it names in the file of --system, and run this again"),
    ("git-unfriendly name", "as the next line says, in the folder of --code"),
    ("remove spaces from filename", "rename the file in the folder of --code: no blanks, no leading dot"),
    ("remove or reduce the size", "take the file out of the folder of --code, or make it smaller"),
    ("Files > 50MB", "take the file out of the folder of --code, and say in its README where it is to be had"),
    ("broken symbolic links", "remove the link from the folder of --code, or put back what it names"),
    ("eval_accuracy", "the run did not reach the target, or evaluates at other steps than the round's"),
    ("failed", "score RESULTS quotes the line of the log; what it logs is changed in the trainer, never in the log"),
)  # fmt: skip
"""Part of a finding of the checkers (mlperf_logging 4.1) -> what to do; the first match counts."""


def remedy(finding: str) -> str:
    """What to do about a checker's finding; how to learn more if it is unknown."""
    known = (advice for words, advice in REMEDIES if words in finding)
    return next(known, "mlperf_logging's source says when it prints this; score RESULTS has our reading of the logs")


def folder_of(submitter: str) -> str:
    """A submitter's folder name: without blanks, as "Juniper Networks" submitted in JuniperNetworks (v4.0)."""
    return "".join(submitter.split())


def counted(names: Sequence[str], needed: int, where: str) -> tuple[list[str], list[str]]:
    """(the first ``needed`` result files in order of their numbers, the others). Raises InputError for too few.

    The order is fixed before the runs, so the choice cannot depend on their times.
    """
    if len(names) < needed:
        raise InputError(f"{where}: holds {len(names)} result files, and a submission has {needed}; confirm more seeds")
    return list(names[:needed]), list(names[needed:])


def tree(
    submitter: str,
    system: str,
    benchmark: str,
    *,
    description: Mapping[str, object],
    results: Sequence[bytes],
    implementation: str,
    code: Mapping[str, bytes],
) -> dict[PurePosixPath, bytes]:
    """Every file of the package by its path; the submitter's folder is its name without blanks.

    system: name of the results folder and of the description's file. results: the logs, in order. implementation:
    name of the code's folder. code: its files by relative path. Raises InputError for an invalid folder name.
    """
    submitter = folder_of(submitter)
    for what, name in (("submitter", submitter), ("system", system), ("implementation", implementation)):
        if not _NAME.fullmatch(name):
            problem = "allowed are letters, digits, '.', '_', '+' and '-', a letter or digit first"
            raise InputError(f"{what} {name!r} names a folder of the package: {problem}")
    top = PurePosixPath(submitter)
    files = {top / "systems" / f"{system}.json": (json.dumps(dict(description), indent=2) + "\n").encode()}
    folder = top / "results" / system / benchmark
    files |= {folder / f"result_{i}.txt": log for i, log in enumerate(results)}
    place = top / "benchmarks" / benchmark / "implementations" / implementation
    return files | {place / path: data for path, data in code.items()}
