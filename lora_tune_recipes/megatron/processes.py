"""Rank and world size of this process under torchrun, srun or no launcher."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from lora_tune.base.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """rank of world, local_rank of per_node on this node; rank 0 listens on address and port."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    per_node: int = 1
    address: str = "127.0.0.1"
    port: int = 0

    @property
    def nodes(self) -> int:
        return self.world // self.per_node

    def variables(self) -> dict[str, str]:
        """The environment variables that torchrun would set."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.per_node),
            "GROUP_RANK": str(self.rank // self.per_node),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def read_processes(environment: Mapping[str, str]) -> Processes:
    """From torchrun's variables if present, else from those of an srun step of several tasks, else a single process.

    Raises InputError if they contradict each other.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        world = _count(environment, "WORLD_SIZE", 1)
        rank, world, local, per_node = (
            _count(environment, name, {"LOCAL_WORLD_SIZE": world}.get(name, 0)) for name in names
        )
        address, port = environment.get("MASTER_ADDR", "127.0.0.1"), _count(environment, "MASTER_PORT", 29500)
    elif _count(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
        rank, world = _count(environment, "SLURM_PROCID", 0), _count(environment, "SLURM_STEP_NUM_TASKS", 1)
        local = _count(environment, "SLURM_LOCALID", 0)
        per_node = world // _count(environment, "SLURM_STEP_NUM_NODES", 1)
        address = first_host(environment.get("SLURM_STEP_NODELIST", "127.0.0.1"))
        port = 20000 + _count(environment, "SLURM_JOB_ID", 0) % 20000
    else:
        return Processes(port=free_port())
    if not 0 <= rank < world or not 0 <= local < per_node or world % per_node:
        raise InputError(
            f"rank {rank} of {world}, {local} of {per_node} on this node: allowed are equal tasks on every node"
        )
    return Processes(rank=rank, world=world, local_rank=local, per_node=per_node, address=address, port=port)


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list: ``dgx[007-009,12]`` -> ``dgx007``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    return (match[1] + (match[2] or "")) if match else nodes


def free_port() -> int:
    """A TCP port that is free on the loopback address now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _count(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if not text:
        return default
    if not text.isdigit():
        raise InputError(f"{name}={text!r}: allowed is a whole number")
    return int(text)
