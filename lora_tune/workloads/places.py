"""Container, data and model under the names that launch scripts read."""

from __future__ import annotations

import os

from lora_tune.site import Site


def places(site: Site) -> dict[str, str]:
    """CONT, DATADIR and MODEL as far as known: the site's, else what the user's shell exports."""
    given = {"CONT": site.container, "DATADIR": site.data, "MODEL": site.model}
    found = {name: str(value) if value else os.environ.get(name, "") for name, value in given.items()}
    return {name: value for name, value in found.items() if value}
