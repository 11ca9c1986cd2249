"""The former place of :mod:`lora_tune_recipes`, for run lines exported before 2026-11-26; until 2027-11-26."""

from importlib.util import find_spec
from pathlib import Path

_moved = find_spec("lora_tune_recipes")
# The relay went to the logs: it serves scripts of all kinds.
__path__ = [*(_moved.submodule_search_locations or [] if _moved else []), str(Path(__file__).parents[1] / "logs")]
