"""The copy of a study that a sweep keeps: its text without the values of secrets, and how these come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_tune.config.secrets import Secret, without_values, written_in
from lora_tune.config.study import Study, load_study


def secrets_written_in(study: Study) -> list[str]:
    """The keys of secrets whose values stand in the study's text."""
    return [key for key, _ in written_in(study.model_dump(mode="python"))]


def text_to_keep(text: str, study: Study, file: Path) -> str:
    """A study's text as a sweep keeps it: without the values of secrets. Raises StudyError, see without_values."""
    return without_values(text, study.model_dump(mode="python"), file)


def with_secrets_of(study: Study, file: Path) -> Study:
    """A study of a kept text with the secrets that its own file has, where that is there."""
    data = study.model_dump(mode="python")
    if not file.is_file() or not any(secret.stored_without_value for _, secret in written_in(data)):
        return study
    _fill(data, load_study(file).model_dump(mode="python"))
    return Study.model_validate(data)


def _fill(kept: dict[str, Any], whole: dict[str, Any]) -> None:
    for key, value in kept.items():
        other = whole.get(key)
        if key == "secrets" and isinstance(other, dict):
            for name, source in value.items():
                if name in other and Secret.model_validate(source).stored_without_value:
                    value[name] = other[name]
        elif isinstance(value, dict) and isinstance(other, dict):
            _fill(value, other)
