"""The agent of CloudAI: against CloudAI itself where it is installed, and else against its interface.

CloudAI is on no package index. With its sources and what they import in ``PYTHONPATH`` these tests run against them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

AGENT = "lora_tune.commands.cloudai_agent"


class _Rewards(BaseModel):
    constraint_failure: float = -1.0
    metric_failure: float = -1.0


class _Config(BaseModel):
    """The keys of CloudAI's own configuration."""

    model_config = ConfigDict(extra="forbid")
    random_seed: int = 42
    start_action: str = "random"
    rewards: _Rewards = Field(default_factory=_Rewards)


class _Agent:
    """What CloudAI's base class does: it keeps environment and configuration, and runs the loop of steps."""

    def __init__(self, env: Any, config: Any) -> None:
        self.env, self.config, self.action_space, self.max_steps = env, config, {}, 0

    def run(self) -> int:
        observation, _ = self.env.reset()
        agent: Any = self
        for _ in range(self.max_steps):
            if (chosen := agent.select_action(observation=observation)) is None:
                break
            observation, reward, done, *_ = self.env.step(chosen[1])
            agent.update_policy(
                {
                    "trial_index": chosen[0],
                    "value": reward,
                    "observation": observation,
                    "action": chosen[1],
                    "done": done,
                }
            )
        return 0


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the agent, over CloudAI or over its interface."""
    if importlib.util.find_spec("cloudai") is None:
        base = ModuleType("cloudai.configurator.base_agent")
        base.__dict__.update(BaseAgent=_Agent, BaseAgentConfig=_Config)
        for name in ("cloudai", "cloudai.configurator"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, AGENT, raising=False)
    yield importlib.import_module(AGENT)
    sys.modules.pop(AGENT, None)


class Cluster:
    """An environment as CloudAI's: 1 / seconds of a step is the reward; three in parallel do not fit."""

    max_steps = 100

    def __init__(self) -> None:
        self.ran: list[dict[str, Any]] = []

    def define_action_space(self) -> dict[str, list[Any]]:
        return {"trainer.tp": [1, 2, 4], "NUM_NODES": [1, 2, 4, 8], "extra_env_vars.MODE": ["ring", "tree"]}

    def define_observation_space(self) -> list[float]:
        return [0.0]

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[list[float], dict[str, Any]]:
        return [0.0], {}

    def step(self, action: dict[str, Any]) -> tuple[list[float], float, bool, dict[str, Any]]:
        self.ran.append(action)
        if action["trainer.tp"] == 1:
            return [-1.0], 1.0, False, {}  # no metric; a reward function that negates makes the best of it
        if action["NUM_NODES"] == 8:
            return [-1.0], -1.0, True, {}
        seconds = 10.0 / action["NUM_NODES"] + action["trainer.tp"]
        return [seconds], 1 / seconds, False, {}


def test_each_combination_runs_once_and_then_it_ends(agents: Any) -> None:
    cluster = Cluster()
    agent = agents.LoraTuneAgent(cluster, agents.LoraTuneAgent.get_config_class()(start_action="first"))
    assert agent.max_steps == 24
    assert agent.run() == 0
    assert cluster.ran[0] == {"trainer.tp": 1, "NUM_NODES": 1, "extra_env_vars.MODE": "ring"}, "what the user has"
    assert len({tuple(action.values()) for action in cluster.ran}) == 24
    assert agent.select_action() is None


def test_a_failed_metric_is_no_success_whatever_its_reward(agents: Any) -> None:
    cluster = Cluster()
    cluster.max_steps = 12
    agents.LoraTuneAgent(cluster, agents.LoraTuneAgentConfig(random_seed=3)).run()
    assert len(cluster.ran) == 12
    assert sum(action["trainer.tp"] == 1 for action in cluster.ran[5:]) < 4, "eight steps of twelve cannot run there"


def test_an_unknown_key_is_refused_as_cloudai_does(agents: Any) -> None:
    with pytest.raises(ValidationError, match="startup"):
        agents.LoraTuneAgentConfig(startup=3)


def test_the_package_declares_it(agents: Any) -> None:
    """CloudAI resolves the name of a scenario through this entry point."""
    table = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    module, _, name = table["project"]["entry-points"]["cloudai.agents"]["lora_tune"].partition(":")
    from cloudai.configurator.base_agent import BaseAgent

    assert issubclass(getattr(importlib.import_module(module), name), BaseAgent)
