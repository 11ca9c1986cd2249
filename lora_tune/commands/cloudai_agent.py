"""The agent ``lora_tune`` of CloudAI's design space exploration: our search proposes, CloudAI runs and judges.

CloudAI finds it by the entry point ``cloudai.agents`` and loads this module only where a scenario names it.
"""

from __future__ import annotations

from typing import Any

from cloudai.configurator.base_agent import BaseAgent, BaseAgentConfig
from pydantic import Field

from lora_tune.search.choices import ChoiceSearch


class LoraTuneAgentConfig(BaseAgentConfig):  # type: ignore[misc]  # CloudAI is not installed where types are checked
    """What ``agent_config`` of a scenario may say, beside CloudAI's own keys."""

    startup_steps: int = Field(default=5, ge=0, description="random proposals before TPE's model is used")


class LoraTuneAgent(BaseAgent):  # type: ignore[misc]
    """Proposes each combination once, at most ``agent_steps`` of them, and ends when all were tried.

    A step whose constraint check failed, whose workload gave no metric, or whose reward is no finite number counts as
    a combination that cannot run, whatever reward CloudAI's function makes of it.
    """

    def __init__(self, env: Any, config: Any) -> None:
        super().__init__(env, config)
        self.configure(env.define_action_space())

    @staticmethod
    def get_config_class() -> type[LoraTuneAgentConfig]:
        """The keys of ``agent_config``."""
        return LoraTuneAgentConfig

    def configure(self, config: dict[str, Any]) -> None:
        """Begin a search. config: the action space, a list of values for each parameter."""
        self.action_space = config
        self._search = ChoiceSearch(
            config,
            seed=self.config.random_seed,
            startup=self.config.startup_steps,
            first=self.config.start_action == "first",
        )
        self._step = 0
        self.max_steps = min(self.env.max_steps, self._search.size)

    def select_action(self, observation: list[float] | None = None) -> tuple[int, dict[str, Any]] | None:
        """The step's number, from 1, and a value for each parameter; None where every combination was tried."""
        action = self._search.ask()
        if action is None:
            return None
        self._step += 1
        return self._step, action

    def update_policy(self, _feedback: dict[str, Any]) -> None:
        """Learn from a step. _feedback: ``value`` is its reward, ``observation`` its metrics, ``done`` a refusal."""
        failed = _feedback["done"] or self.config.rewards.metric_failure in _feedback["observation"]
        self._search.tell(None if failed else float(_feedback["value"]))
