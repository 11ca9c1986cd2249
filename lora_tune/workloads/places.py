"""Container, data, model and tokenizer under the names that launch scripts read."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from lora_tune.site import Site

ALSO: Mapping[str, tuple[str, ...]] = {
    "CONT": ("CONT_FILE",),
    "DATADIR": ("PREPROC_DATA",),
    "MODEL": ("LOAD_CHECKPOINTS_PATH",),
    "TOKENIZER": (),
}
"""Our name -> what other recipes call it: Inventec's env.sh, and Llama 3.1 405B."""


def places(site: Site, reads: Collection[str] = ()) -> dict[str, str]:
    """CONT, DATADIR, MODEL and TOKENIZER as far as known: the site's, else what the user's shell exports.

    reads: the variables that the recipe reads; a place is then set under each of its names among them.
    """
    given = {"CONT": site.container, "DATADIR": site.data, "MODEL": site.model}
    found: dict[str, str] = {}
    for name, others in ALSO.items():
        shell = (os.environ.get(n, "") for n in (name, *others))
        value = str(given.get(name) or "") or site.environment.get(name, "") or next(filter(None, shell), "")
        found |= {n: value for n in (name, *others) if value and (n == name or n in reads)}
    return found
