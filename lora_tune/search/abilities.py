"""What a sampler may be able to say beyond its proposals; who asks looks with ``isinstance``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import optuna

    from lora_tune.search.grey_box.sampler import Advantage


@runtime_checkable
class Recommends(Protocol):
    """A sampler with a model of its own."""

    def recommend(self, study: optuna.Study) -> tuple[dict[str, Any], float, str]:
        """The configuration that it believes best: values, expected objective, a sentence. Pure: by the trials alone.

        Raises ValueError while nothing is known that could be recommended.
        """
        ...


@runtime_checkable
class KnowsGain(Protocol):
    """A sampler that can say what another node-hour would bring."""

    def expected_gain(self, study: optuna.Study) -> float | None:
        """Share of the score by which the next node-hour is expected to improve the best; None where it cannot say."""
        ...


@runtime_checkable
class Plans(Protocol):
    """A sampler that searches in stages."""

    def plan(self) -> list[str]:
        """What each stage costs and can win, before any run, and why one is skipped; a line each."""
        ...


@runtime_checkable
class Compares(Protocol):
    """A sampler that can say what a change is worth."""

    def compared(
        self, study: optuna.Study, values: Mapping[str, Any], instead: Sequence[Mapping[str, Any]]
    ) -> list[Advantage]:
        """What is believed of ``values`` beside each of ``instead``. Empty where it cannot say."""
        ...
