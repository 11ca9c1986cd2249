"""Studies that a service may run: signed with a key that only those have who may run programs as its user.

A study's text names commands. Whoever may write to the service's database could put any of them there; with a key the
service drives only what was registered by somebody who has it.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass
from pathlib import Path

from lora_tune.base.errors import SetupError
from lora_tune.store import Registered

KEY_BYTES = 32
"""The least length of a key: ``head -c 32 /dev/urandom > FILE``."""

_OTHERS = 0o077


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A key for HMAC-SHA256. Its text is never shown."""

    _key: bytes

    def __repr__(self) -> str:
        return "SigningKey(***)"

    def sign(self, study: Registered) -> str:
        """The signature of everything of a registration from which programs are run, in hexadecimal digits."""
        return hmac.new(self._key, _signed(study), "sha256").hexdigest()

    def check(self, study: Registered) -> None:
        """Raise SetupError unless the registration carries this key's signature."""
        if hmac.compare_digest(self.sign(study), study.signature):
            return
        fault = "is not signed" if not study.signature else "has another signature: it was changed, or signed elsewhere"
        raise SetupError(
            f"{fault}; this service drives studies that are signed with its key only. Look at the study, and register "
            f"it again: python -m lora_tune.sweep --study {study.name} --register --signing-key FILE"
        )


def _signed(study: Registered) -> bytes:
    places = [str(place) for place in (study.cwd, study.file, study.folder)]
    return json.dumps([study.name, study.study_toml, *places, study.options], sort_keys=True).encode()


def read_key(file: Path) -> SigningKey:
    """The key in a file. Raises SetupError where it cannot be read, is too short, or others can read it."""
    try:
        mode, key = file.stat().st_mode, file.read_bytes()
    except OSError as error:
        raise SetupError(f"the signing key {file} cannot be read: {error.strerror}") from error
    if mode & _OTHERS:
        raise SetupError(f"the signing key {file} can be read by others; chmod 600 {file}")
    if len(key) < KEY_BYTES:
        raise SetupError(
            f"the signing key {file} has {len(key)} bytes, {KEY_BYTES} are needed; make one: "
            f"(umask 077; head -c {KEY_BYTES} /dev/urandom > {file})"
        )
    return SigningKey(key)
