"""Which layouts exist on a number of GPUs, and what they are called."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lora_tune.config.layout import Layout, LayoutAxes, config_file_name, parse_layout, with_minibs


def names(axes: LayoutAxes, gpus: int) -> list[str]:
    return [str(layout) for layout in axes.enumerate(gpus).layouts]


def test_minibs_follows_from_a_fixed_global_batch_size() -> None:
    axes = LayoutAxes(tp=(1, 2, 4), cp=(1, 2), gbs=(8,))
    assert names(axes, 8) == [
        "tp1 pp1 cp1 minibs1 mbs1",
        "tp1 pp1 cp2 minibs2 mbs1",
        "tp2 pp1 cp1 minibs2 mbs1",
        "tp2 pp1 cp2 minibs4 mbs1",
        "tp4 pp1 cp1 minibs4 mbs1",
        "tp4 pp1 cp2 minibs8 mbs1",
    ]


def test_the_published_batch_of_18_nodes_with_4_gpus() -> None:
    (layout,) = LayoutAxes(tp=(1,), cp=(8,), minibs=(1,)).enumerate(72).layouts
    assert (layout.dp(72), layout.gbs(72)) == (9, 9)


@pytest.mark.parametrize(
    ("axes", "gpus", "rule"),
    [
        (LayoutAxes(tp=(8,), minibs=(1,)), 4, r"4 GPUs % (TP\*PP\*CP) = 0"),
        (LayoutAxes(tp=(3,), minibs=(1,)), 6, r"TP divides 8"),
        (LayoutAxes(tp=(1,), minibs=(3,), mbs=(2,)), 8, "MINIBS % MBS = 0"),
        (LayoutAxes(tp=(4,), cp=(4,), minibs=(1,), all_to_all=True), 16, r"TP\*CP divides 8"),
        (LayoutAxes(tp=(1,), sp=(1,), minibs=(1,)), 8, "SP=1 needs TP >= 2"),
        (LayoutAxes(tp=(1,), gbs=(9,)), 8, r"GBS in \[9\]"),
        (LayoutAxes(vp=(2,), minibs=(1,)), 8, "VP > 1 needs PP > 1"),
        (LayoutAxes(pp=(2,), ep=(8,), minibs=(1,)), 8, r"8 GPUs % (PP\*EP) = 0"),
        (LayoutAxes(ep=(3,), minibs=(1,), experts=32), 6, "EP divides 32"),
    ],
)
def test_says_which_rule_leaves_nothing(axes: LayoutAxes, gpus: int, rule: str) -> None:
    table = axes.enumerate(gpus)
    assert table.layouts == ()
    assert re.search(rule.replace("(", r"\(").replace(")", r"\)"), table.why_empty())


@pytest.mark.parametrize("axes", [{"tp": [1]}, {"tp": [0], "minibs": [1]}, {"sp": [2], "minibs": [1]}, {"x": 1}])
def test_refuses_axes_that_mean_nothing(axes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LayoutAxes.model_validate(axes)


@pytest.mark.parametrize(
    ("text", "gpus", "layout"),
    [
        ("tp4 pp8 cp2 gbs896 mbs1 vp8", 512, "tp4 pp8 cp2 minibs112 mbs1 vp8"),
        ("tp4 pp8 cp2 gbs896 mbs1 vp8", 256, "tp4 pp8 cp2 minibs224 mbs1 vp8"),
        ("tp1 pp1 cp1 gbs8 mbs1 nodes2", 999, "tp1 pp1 cp1 minibs4 mbs1 nodes2"),  # nodes of one GPU
        ("tp4 pp1 cp1 minibs4 mbs1 sp1", 8, "tp4 pp1 cp1 minibs4 mbs1 sp1"),
        ("tp4 pp1 cp1 gbs9 mbs1", 8, "tp4 pp1 cp1 gbs9 mbs1"),  # two ranks
        ("tp4 pp8 cp2 gbs896 mbs1", 8, "tp4 pp8 cp2 gbs896 mbs1"),  # needs more GPUs
        ("tp0 pp1 cp1 gbs8 mbs1", 8, "tp0 pp1 cp1 gbs8 mbs1"),
        ("gbs8", 8, "gbs8"),
        ("", 8, ""),
    ],
)
def test_a_layout_that_states_its_batch_takes_the_minibs_of_the_machine(text: str, gpus: int, layout: str) -> None:
    assert with_minibs(text, gpus, 1 if "nodes" in text else 0) == layout


degrees = st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3).map(tuple)


@given(degrees, degrees, degrees, degrees, degrees, st.sampled_from([1, 4, 8, 72, 512]))
def test_every_offered_layout_divides_and_reads_back(
    tp: tuple[int, ...],
    pp: tuple[int, ...],
    cp: tuple[int, ...],
    mbs: tuple[int, ...],
    minibs: tuple[int, ...],
    gpus: int,
) -> None:
    axes = LayoutAxes(tp=tp, pp=pp, cp=cp, mbs=mbs, minibs=minibs)
    for layout in axes.enumerate(gpus).layouts:
        assert gpus % (layout.tp * layout.pp * layout.cp) == 0
        # NVIDIA's formula, which floors, gives the same batch because nothing is left over.
        assert layout.gbs(gpus) == (layout.minibs * (gpus // (layout.tp * layout.pp))) // layout.cp
        assert layout.minibs % layout.mbs == 0
        assert parse_layout(str(layout)) == layout


@given(st.text(max_size=30))
def test_any_other_text_is_no_layout(text: str) -> None:
    if not text.startswith("tp"):
        with pytest.raises(ValueError, match="is not a layout"):
            parse_layout(text)


def test_file_names_are_those_of_the_field() -> None:
    layout = Layout(tp=4, pp=1, cp=2, minibs=8)
    assert config_file_name("DGXH100", 1, 8, layout) == "config_DGXH100_1x8x8xtp4pp1cp2.sh"
    assert config_file_name("a b/../$(x)", 2, 8, layout, "cg fp8") == "config_a-b-x_2x8x8xtp4pp1cp2_cg-fp8.sh"


def public_configs(folder: Path) -> list[dict[str, str]]:
    with (folder / "configs.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def layout_in(row: dict[str, str]) -> Layout:
    """A public config's layout; two do not set PP, which is then 1."""
    return Layout(tp=int(row["TP"]), pp=int(row["PP"] or 1), cp=int(row["CP"]), minibs=int(row["MINIBS"]))


@pytest.mark.public_data
def test_agrees_with_every_public_config_whose_batch_is_known(public_data: Path) -> None:
    floored = 0
    known = [row for row in public_configs(public_data) if row["gbs"]]
    for row in known:
        layout, gpus, gbs = layout_in(row), int(row["gpus"]), int(row["gbs"])
        assert (layout.minibs * (gpus // (layout.tp * layout.pp))) // layout.cp == gbs, "the implementation's formula"
        if gpus % (layout.tp * layout.pp * layout.cp):
            floored += 1  # it trains another batch than its author meant; we never offer it
            axes = LayoutAxes(tp=(layout.tp,), pp=(layout.pp,), cp=(layout.cp,), minibs=(layout.minibs,))
            assert axes.enumerate(gpus).layouts == ()
        else:
            assert layout.gbs(gpus) == gbs, row["file"]
    assert (len(known), floored) == (251, 1)


@pytest.mark.public_data
def test_writes_the_published_name_of_every_config_that_says_what_it_holds(public_data: Path) -> None:
    checked = 0
    for row in public_configs(public_data):
        named = re.fullmatch(r"config_(.+?)_\d+x\d+x\d+xtp\d+pp\d+cp\d+(?:_(.+))?\.sh", row["file"])
        if named is None or row["fn_mismatch"]:
            continue
        nodes = int(row["DGXNNODES"])
        gpus = int(row["gpus"]) // nodes
        made = config_file_name(named[1], nodes, gpus, layout_in(row), named[2] or "")
        assert _same(made, row["file"]), row["file"]
        checked += 1
    assert checked == 190


def _same(made: str, published: str) -> bool:
    """Equal but for what we keep out of names: ``_`` and ``.`` within a system or a suffix are ``-``."""
    return re.sub(r"[_.]", "-", made) == re.sub(r"[_.]", "-", published)


def test_experts_spread_over_ranks_leave_the_batch_and_are_named() -> None:
    """gpt_oss_20b on 64 GPUs as Cisco published it in v6.0: tp2 pp1 cp1 ep4."""
    axes = LayoutAxes(tp=(2,), ep=(1, 4), minibs=(1,), experts=32)
    one, four = axes.enumerate(64).layouts
    assert (str(one), str(four)) == ("tp2 pp1 cp1 minibs1 mbs1", "tp2 pp1 cp1 minibs1 mbs1 ep4")
    assert one.gbs(64) == four.gbs(64) == 32
    assert axes.values(four)["EP"] == 4
    assert config_file_name("DGXH100", 8, 8, four) == "config_DGXH100_8x8x1xtp2pp1cp1ep4.sh"
    assert parse_layout(str(four)) == four
