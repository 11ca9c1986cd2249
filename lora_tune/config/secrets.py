"""Secret variables of jobs: passed through the environment, never recorded, and referenced in a study.

In ``environment`` of a site or workload, ``HF_TOKEN = { env = "HF_TOKEN" }`` reads the value from the driver's
environment, ``{ file = "~/.hf_token" }`` from a file. A plain text under a name that looks like a secret counts as
``{ value = "...", secret = true }``: it is passed in the same way, and omitted from the sweep's copies of the study.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from lora_tune.base.errors import SetupError, StudyError
from lora_tune.base.text import HIDDEN, names_secret


class Secret(BaseModel):
    """Where a secret's value comes from: a variable, a file, or the study itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    env: str | None = Field(None, min_length=1)
    file: Path | None = None
    value: SecretStr | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Secret:
        if sum(source is not None for source in (self.env, self.file, self.value)) != 1:
            raise ValueError("a secret needs one of env, file and value")
        return self

    @property
    def stored_without_value(self) -> bool:
        """Whether this is the placeholder in a sweep's copy of a study."""
        return self.value is not None and self.value.get_secret_value() == HIDDEN

    def read(self, name: str) -> str:
        """The value. Raises SetupError if its source lacks it. name: the variable that gets it."""
        if self.env is not None:
            value = os.environ.get(self.env)
            if value is None:
                raise SetupError(f"{name}: {self.env} is not set where the sweep is driven; export {self.env} there")
            return value
        if self.file is not None:
            try:
                return self.file.expanduser().read_text(encoding="utf-8").rstrip("\r\n")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
                raise SetupError(f"{name}: {self.file} cannot be read: {reason}") from error
        assert self.value is not None
        if self.stored_without_value:
            raise SetupError(
                f"{name}: the study was stored without the value of this secret, and its file is not there; give it by "
                f'reference in the study: {name} = {{ env = "{name}" }}, or {{ file = "PATH" }}'
            )
        return self.value.get_secret_value()


class Variables(BaseModel):
    """A section of a study with variables for jobs: plain ones, and secrets apart from them."""

    environment: dict[str, str] = Field(
        default_factory=dict,
        description='further variables; { env = "NAME" } or { file = "PATH" } is a secret, written nowhere',
    )
    secrets: dict[str, Secret] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _apart(cls, table: Any) -> Any:
        return with_secrets_apart(table) if isinstance(table, dict) else table


def with_secrets_apart(table: Mapping[str, Any]) -> dict[str, Any]:
    """A section, with nested sections, whose secrets are moved from ``environment`` to ``secrets``.

    ``{ value = "...", secret = false }`` marks a value as no secret despite its name.
    """
    section = {key: with_secrets_apart(inner) if _has_variables(inner) else inner for key, inner in table.items()}
    environment = section.get("environment")
    if not isinstance(environment, dict):
        return section
    plain, secrets = {}, dict(section.get("secrets") or {})
    for name, value in environment.items():
        if isinstance(value, dict):
            entry = {**value}
            if entry.pop("secret", True) is False and "value" in entry:
                plain[name] = entry["value"]
            else:
                secrets[name] = Secret.model_validate(entry)
        elif isinstance(value, str) and value and names_secret(name):
            secrets[name] = Secret(value=SecretStr(value))
        else:
            plain[name] = value
    section["environment"] = plain
    return section | ({"secrets": secrets} if secrets else {})


def _has_variables(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("environment"), dict)


def written_in(study: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Secret]]:
    """Every secret of a dumped study whose value is in the study itself, with its key."""
    for key, value in study.items():
        path = f"{where}.{key}" if where else key
        if key == "secrets" and isinstance(value, dict):
            for name, source in value.items():
                secret = Secret.model_validate(source)
                if secret.value is not None:
                    yield f"{where}.environment.{name}", secret
        elif isinstance(value, dict):
            yield from written_in(value, path)


def without_values(text: str, study: Mapping[str, Any], file: Path) -> str:
    """A study's text with secret values hidden, for the sweep's copies.

    Raises StudyError for a value spelled in a way that is not found.
    """
    for key, secret in written_in(study):
        assert secret.value is not None
        value = secret.value.get_secret_value()
        for spelled in (json.dumps(value), json.dumps(value, ensure_ascii=False), f"'{value}'"):
            text = text.replace(spelled, json.dumps(HIDDEN))
        if value in _strings(tomllib.loads(text)):
            raise StudyError(file, key, 'is a secret, spelled so that it cannot be hidden; give it as { env = "NAME" }')
    return text


def _strings(value: Any) -> Iterator[str]:
    """Every text in a parsed TOML document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
