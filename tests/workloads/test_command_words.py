"""The words of a command that no shell runs: what only a shell would understand is told, and what is to be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_tune.workloads.command import shell_tokens, shell_variable, single_token


def test_an_operator_of_the_shell_is_doubted_where_there_is_none() -> None:
    (doubt,) = shell_tokens(["python", "train.py", "|", "tee", ">", "log"])
    assert doubt.startswith("workload.argv: '|': no shell runs this command")
    assert shell_tokens(["bash", "-c", "python train.py | tee log"]) == []


def test_a_parameter_as_a_variable_is_known_where_no_shell_fills_it_in() -> None:
    assert shell_variable(["python", "--lr=${LR}"], {"LR"}) == "LR"
    assert shell_variable(["python", "--home=$HOME"], {"LR"}) == ""
    assert shell_variable(["srun", "/bin/bash", "-c", "python --lr=$LR"], {"LR"}) == ""


@pytest.mark.parametrize(
    "argv",
    [["fish", "-c", "python t.py $LR"], ["sbatch", "--wait", "--wrap", "python t.py $LR"], ["perl", "-e", "print $LR"]],
)
def test_a_text_for_another_interpreter_is_its_own(argv: list[str]) -> None:
    assert shell_variable(argv, {"LR"}) == ""


def test_a_command_line_in_one_word_is_taken_apart_and_a_name_with_a_space_is_not(tmp_path: Path) -> None:
    assert single_token("python train.py", tmp_path) == (
        'workload.argv: \'python train.py\' is one word; write ["python", "train.py"]'
    )
    (tmp_path / "my train").touch()
    assert single_token("my train", tmp_path) == ""
