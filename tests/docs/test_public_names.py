"""The public folders and files that pages and studies name: all, and each as it is in the published repositories."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

FOLDERS = {
    "training_results_v4.1/Supermicro/benchmarks/llama2_70b_lora/implementations/nemo",
    "training_results_v5.0/NVIDIA/benchmarks/llama2_70b_lora/implementations/nyx_n1_ngc25.04_nemo",
    "training_results_v5.0/Oracle/benchmarks/llama2_70b_lora/implementations/1xBM.GPU.GB200.4",
    "training_results_v5.1/AMD/benchmarks/llama2_70b_lora/implementations/MI355X_EPYC_9575F_pytorch_llama2_70b",
    "training_results_v5.1/Dell/benchmarks/llama2_70b_lora/implementations/nemo",
}
"""Repository and folder, as published by MLCommons; looked up on 2026-11-22."""

_V41 = "training_results_v4.1/NVIDIA/benchmarks/llama2_70b_lora/implementations"
_V50 = "training_results_v5.0/NVIDIA/benchmarks/llama2_70b_lora/implementations"
SISTERS = {
    "eos_ngc24.09_nemo": _V41,
    "nyx_n1_ngc25.04_nemo": _V50,
    "tyche_ngpu8_ngc25.04_nemo": _V50,
}
"""Folders that pages name by their last part alone, and where they are."""

CONFIGS = {
    "configs/config_DGXH100_1x8x4xtp4pp1cp1.sh": "training_results_v4.1/Supermicro",
    "config_GB200_1x4x4xtp1pp1cp2.sh": "training_results_v5.0/Oracle",
    "config_MI355X_1x8x1.sh": "training_results_v5.1/AMD",
    "config_XE9780x8B200-SXM-180GB_1x8x1xtp1pp1cp1.sh": "training_results_v5.1/Dell",
    "config_DGXB300_1x8x1xtp1pp1cp1_fp4.sh": "training_results_v5.1/Dell",
}
"""Configs in one of FOLDERS that pages tell their readers to use."""

TEXTS = sorted(
    [
        *(REPOSITORY / "docs").glob("*.md"),
        *(REPOSITORY / "benchmarks" / "records").glob("*.md"),
        *(REPOSITORY / "studies").rglob("*.toml"),
        REPOSITORY / "README.md",
    ]
)


def _named(pattern: str) -> set[str]:
    return {found for text in TEXTS for found in re.findall(pattern, text.read_text(encoding="utf-8"))}


def test_every_public_folder_that_is_named_is_listed_and_every_listed_one_is_named() -> None:
    assert _named(r"training_results_v[\d.]+/[\w./-]*implementations/[\w.-]+") == FOLDERS


def test_every_folder_of_nvidia_that_is_named_by_its_last_part_is_listed() -> None:
    assert _named(r"\b(?:eos|nyx|tyche|theia)(?:_\w+?)?_ngc[\d.]+_nemo\b") == SISTERS.keys()


def test_every_listed_config_is_named() -> None:
    pages = "\n".join(text.read_text(encoding="utf-8") for text in TEXTS)
    assert [name for name in CONFIGS if name not in pages] == []


@pytest.mark.skipif("LORA_TUNE_PUBLIC_RESULTS" not in os.environ, reason="names no folder with the public repositories")
def test_they_are_there() -> None:
    root = Path(os.environ["LORA_TUNE_PUBLIC_RESULTS"])
    sisters = {f"{place}/{name}" for name, place in SISTERS.items()}
    configs = {f"{folder}/{name}" for name, of in CONFIGS.items() for folder in FOLDERS if folder.startswith(of)}
    assert [name for name in sorted(FOLDERS | sisters | configs) if not (root / name).exists()] == []
