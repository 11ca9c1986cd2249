"""Container, data, model and tokenizer under the names that launch scripts read."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from lora_tune.config.site import Site

ALSO: Mapping[str, tuple[str, ...]] = {
    "CONT": ("CONT_FILE",),
    "DATADIR": ("PREPROC_DATA",),
    "MODEL": ("LOAD_CHECKPOINTS_PATH",),
    "TOKENIZER": (),
}
"""Our name -> what other recipes call it: Inventec's env.sh, and Llama 3.1 405B."""


def required(reads: Collection[str]) -> list[tuple[str, ...]]:
    """Which places a recipe that reads ``reads`` needs, each under the names that it goes by there."""
    return [known for name, others in ALSO.items() if (known := tuple(n for n in (name, *others) if n in reads))]


_IMAGES = (".sqsh", ".sqfs", ".squashfs", ".sif")
"""What ends the name of a container that is a file."""


def is_image_file(container: str) -> bool:
    """Whether CONT is a file, not an image of a registry such as ``nvcr.io/nvidia/pytorch:25.04-py3``."""
    return container.startswith(("/", ".")) or container.endswith(_IMAGES)


def misplaced(named: Mapping[str, str], folder: Path) -> list[str]:
    """A sentence, its last part the remedy, for each relative path that a job does not find that starts in ``folder``.

    pyxis takes a container's name without ``/`` or ``.`` at its head for an image of a registry.
    """
    sentences = []
    for name in (n for ours, others in ALSO.items() for n in (ours, *others) if n != "TOKENIZER"):
        value, container = named.get(name, ""), name in ("CONT", *ALSO["CONT"])
        if not value or value.startswith("/") or (container and not is_image_file(value)):
            continue
        bare = container and not value.startswith(".")
        if (folder / value).exists() and not bare:
            continue
        why = "pyxis takes it for an image of a registry" if bare else f"jobs start in {folder}, where it is not"
        there = next((root / value for root in (folder, Path.cwd()) if (root / value).exists()), None)
        remedy = f"name it by its whole path{f', {there.resolve()}' if there else ''}"
        sentences.append(f"{name}={value} is relative, and {why}; {remedy}")
    return sentences


def unseen(named: Mapping[str, str]) -> list[str]:
    """Places that are absolute paths with nothing at them as this machine sees it, one sentence each.

    A node may see more: its own disk, for one.
    """
    return [
        f"{name}={value} is not there as this machine sees it; a trial fails unless its node has it "
        "(python -m lora_tune.doctor --probe asks a node)"
        for name, value in named.items()
        if value.startswith("/") and not Path(value).exists()
    ]


def given_by_site(site: Site, name: str) -> bool:
    """Whether the site profile names the place that scripts call ``name``."""
    paths = {"CONT": site.container, "DATADIR": site.data, "MODEL": site.model}
    ours = next((n for n, others in ALSO.items() if name in (n, *others)), name)
    return bool(paths.get(ours)) or not {ours, name}.isdisjoint(site.environment)


def places(site: Site, reads: Collection[str] = ()) -> dict[str, str]:
    """CONT, DATADIR, MODEL and TOKENIZER as far as known: the site's, else what the user's shell exports.

    reads: the variables that the recipe reads; a place is then set under each of its names among them.
    """
    paths = {"CONT": site.container, "DATADIR": site.data, "MODEL": site.model}
    known: dict[str, str] = {}
    for name, others in ALSO.items():
        shell = (os.environ.get(n, "") for n in (name, *others))
        value = str(paths.get(name) or "") or site.environment.get(name, "") or next(filter(None, shell), "")
        known |= {n: value for n in (name, *others) if value and (n == name or n in reads)}
    return known
