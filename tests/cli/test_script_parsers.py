"""``init`` asks a script's own parser: trial 0 is today's command, and every range contains what is set today.

Each parser is the library itself. Those that are not installed are left out of a run; ``pip install -e '.[dev]'``
installs all of them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.config.study import load_study
from lora_tune.init import main as init
from lora_tune.sweep import main as sweep
from lora_tune.workloads import load as load_workload
from lora_tune.workloads.base import Proposal
from lora_tune.workloads.config_file import changed, scalars
from lora_tune.workloads.proposed_space import Option, propose

TRAINS = "open('trained', 'w').close()\n"

ARGPARSE = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--batch-size", type=int, default=1, help="samples (the default: 32 once was)")
parser.add_argument("--warmup-steps", type=int, default=500)
parser.add_argument("--max-steps", type=int, default=3000)
parser.parse_args()
"""
SIMPLE_PARSING = """
from dataclasses import dataclass
from simple_parsing import ArgumentParser
@dataclass
class Training:
    lr: float = 2e-3
    batch_size: int = 1
    warmup_steps: int = 500
    max_steps: int = 3000
parser = ArgumentParser()
parser.add_arguments(Training, dest="training")
parser.parse_args()
"""
HF = """
import sys
from dataclasses import dataclass
from transformers import HfArgumentParser
@dataclass
class Training:
    lr: float = 2e-3
    batch_size: int = 1
    warmup_steps: int = 500
    max_steps: int = 3000
parser = HfArgumentParser(Training)
if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
    parser.parse_json_file(sys.argv[1])
else:
    parser.parse_args_into_dataclasses()
"""
CLICK = """
import click
@click.group()
def main(): pass
@main.command()
@click.option("--lr", default=2e-3)
@click.option("--batch-size", default=1)
@click.option("--warmup-steps", default=500)
@click.option("--max-steps", default=3000)
def train(**options): open("trained", "w")
main()
"""
TYPER = """
import typer
def main(lr: float = 2e-3, batch_size: int = 1, warmup_steps: int = 500, max_steps: int = 3000):
    open("trained", "w")
typer.run(main)
"""
ABSL = """
from absl import app, flags
flags.DEFINE_float("lr", 2e-3, "learning rate")
flags.DEFINE_integer("batch_size", 1, "samples")
flags.DEFINE_integer("warmup_steps", 500, "steps")
flags.DEFINE_integer("max_steps", 3000, "steps")
app.run(lambda argv: open("trained", "w"))
"""
JSONARGPARSE = """
from jsonargparse import ArgumentParser
fit = ArgumentParser()
fit.add_argument("--config", action="config")
fit.add_argument("--model.lr", type=float, default=2e-3)
fit.add_argument("--data.batch_size", type=int, default=1)
fit.add_argument("--model.warmup_steps", type=int, default=500)
fit.add_argument("--trainer.max_steps", type=int, default=3000)
parser = ArgumentParser()
parser.add_subcommands().add_subcommand("fit", fit)
parser.parse_args()
"""
LIGHTNING = """
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
class Net(LightningModule):
    def __init__(self, lr: float = 2e-3, warmup_steps: int = 500): super().__init__()
class Data(LightningDataModule):
    def __init__(self, batch_size: int = 1): super().__init__()
LightningCLI(Net, Data, trainer_defaults={"max_steps": 3000, "logger": False})
"""
HYDRA = """
import hydra
@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config): open("trained", "w")
main()
"""
TYRO = """
from dataclasses import dataclass
import tyro
@dataclass
class Training:
    lr: float = 2e-3
    batch_size: int = 1
    warmup_steps: int = 500
    max_steps: int = 3000
tyro.cli(Training)
"""
FIRE = """
import fire
def train(lr=2e-3, batch_size=1, warmup_steps=500, max_steps=3000): open("trained", "w")
fire.Fire(train)
"""
CONFIG = "# today\nlr: 2.0e-3   # rate\nbatch_size: 1\nwarmup_steps: 500\nmax_steps: 3000\n"
TOML = """# today
notes = '''
batch_size = 64
'''
max_steps = 3000
optimizer.lr = 2e-3   # rate
[data]
"batch_size" = 1
files = ["a", "b"]
[[stages]]
lr = 0.5
[schedule.warmup]
warmup_steps = 500
"""
READS_TOML = """
import argparse, tomllib
parser = argparse.ArgumentParser()
parser.add_argument("--config")
config = tomllib.load(open(parser.parse_args().config, "rb"))
"""
READS_YAML = """
import argparse, yaml
parser = argparse.ArgumentParser()
parser.add_argument("--config")
config = yaml.safe_load(open(parser.parse_args().config))
"""
GIN = """# today
include 'models/small.gin'
train.max_steps = 3000
train.model = @Small()
Adam.learning_rate = 2e-3   # rate
Adam.weight_decay = %DECAY
data/loader.batch_size = 1
Schedule.warmup_steps = 500
name = 'small'
"""
READS_GIN = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--gin_file")
parser.parse_args()
"""
CONFIGURED = """
lr = 2e-3
batch_size = 1
warmup_steps = 500
max_steps = 3000
exec(open("configurator.py").read())
"""

PARSERS = [
    pytest.param("argparse", ARGPARSE, (), id="argparse"),
    pytest.param("simple_parsing", SIMPLE_PARSING, (), id="simple-parsing"),
    pytest.param("transformers", HF, (), id="HfArgumentParser"),
    pytest.param("click", CLICK, ("train",), id="click"),
    pytest.param("typer", TYPER, (), id="typer"),
    pytest.param("absl", ABSL, (), id="absl"),
    pytest.param("jsonargparse", JSONARGPARSE, ("fit",), id="LightningCLI's jsonargparse"),
    pytest.param("lightning", LIGHTNING, ("fit",), id="LightningCLI"),
    pytest.param("hydra", HYDRA, (), id="Hydra"),
    pytest.param("tyro", TYRO, (), id="tyro"),
    pytest.param("fire", FIRE, (), id="fire"),
    pytest.param("yaml", READS_YAML, ("--config", "conf/config.yaml"), id="YAML"),
    pytest.param("argparse", READS_TOML, ("--config", "conf/config.toml"), id="TOML"),
    pytest.param("argparse", READS_GIN, ("--gin_file", "conf/config.gin"), id="gin"),
    pytest.param("transformers", HF, ("conf/config.json",), id="HfArgumentParser's JSON"),
    pytest.param("argparse", CONFIGURED, (), id="constants"),
]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(CONFIG)
    (tmp_path / "conf" / "config.json").write_text(json.dumps({"lr": 2e-3, "batch_size": 1, "warmup_steps": 500,
                                                               "max_steps": 3000}))  # fmt: skip
    (tmp_path / "conf" / "config.toml").write_text(TOML)
    (tmp_path / "conf" / "config.gin").write_text(GIN)
    (tmp_path / "configurator.py").write_text("import sys\nfor word in sys.argv[1:]:\n    assert '=' in word\n")
    return tmp_path


def begun(script: str, *words: str) -> dict[str, Any]:
    """The study that init writes for a script."""
    Path("train.py").write_text(script + TRAINS)
    done = CliRunner().invoke(init, ["python", "train.py", *words])
    assert done.exit_code == 0, done.output
    return tomllib.loads(Path("mine.toml").read_text())


@pytest.mark.parametrize(("library", "script", "words"), PARSERS)
def test_a_parser_says_what_is_set_today(library: str, script: str, words: tuple[str, ...]) -> None:
    pytest.importorskip(library)
    study = begun(script, *words)
    assert study["search"]["enqueue"] == [{"LR": 0.002, "BATCH_SIZE": 1, "WARMUP_STEPS": 500}]
    assert study["space"]["LR"] == {"type": "float", "low": 2e-4, "high": 2e-2, "log": True}
    assert study["space"]["BATCH_SIZE"]["choices"] == [1, 2]
    assert study["space"]["WARMUP_STEPS"] == {"type": "int", "low": 0, "high": 1500, "step": 10}
    assert not Path("trained").exists(), "nothing was trained"


@pytest.mark.parametrize(
    ("library", "script", "words"), [parser for parser in PARSERS if "config" not in "".join(parser.values[2])]
)
def test_what_the_command_says_is_what_is_set_today(library: str, script: str, words: tuple[str, ...]) -> None:
    """Not of those that read their values from a file."""
    pytest.importorskip(library)
    if library in ("jsonargparse", "lightning"):
        typed: tuple[str, ...] = ("--model.lr=0.5", "--trainer.max_steps=400")
    else:
        dashed = ("--lr=0.5", "--max_steps=400" if library == "absl" or script is CONFIGURED else "--max-steps=400")
        dashed = ("--lr=0.5", "--max_steps=400") if library in ("simple_parsing", "fire") else dashed
        typed = ("lr=0.5", "max_steps=400") if library == "hydra" else dashed
    study = begun(script, *words, *typed)
    assert study["search"]["enqueue"] == [{"LR": 0.5, "BATCH_SIZE": 1}], "warm-up of 500 in 400 steps: no room"
    argv = study["workload"]["argv"]
    assert argv[2 + len(words)] == typed[0].replace("0.5", "{LR}")
    assert argv[3 + len(words)] == typed[1], "what is not tuned stays as it was typed"


def job_of(study: str = "mine.toml", **parameters: Any) -> Any:
    workload = load_workload(load_study(Path(study)), Path(study))
    proposal = Proposal(number=0, attempt=0, seed=1, parameters={"NODES": 1, **parameters})
    return workload.job(proposal, Path("attempt"))


def test_each_trial_has_a_changed_copy_of_the_config_file() -> None:
    pytest.importorskip("yaml")
    begun(READS_YAML, "--config", "conf/config.yaml")
    job = job_of(LR=3e-5, BATCH_SIZE=2, WARMUP_STEPS=0)
    assert job.argv[1:] == ("train.py", "--config", "attempt/config/config.yaml")
    copy = "# today\nlr: 3.0e-05   # rate\nbatch_size: 2\nwarmup_steps: 0\nmax_steps: 3000\n"
    assert job.files == {"config/config.yaml": copy}
    dry = CliRunner().invoke(sweep, ["--study", "mine.toml", "--dry-run"])
    assert dry.exit_code == 0, dry.output
    Path("conf/config.yaml").write_text("lr: 1.0\n")
    Path("mine.toml").write_text(Path("mine.toml").read_text().replace("EDIT", "decided"))
    gone = CliRunner().invoke(sweep, ["--study", "mine.toml"])
    assert gone.exit_code in (2, 3)
    assert "workload.config: conf/config.yaml: there is no key 'batch_size'; it has lr" in gone.output


@given(
    st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.floats(-1e9, 1e9) | st.integers() | st.booleans(),
                    max_size=4),
    st.floats(1e-9, 1e9),
)  # fmt: skip
@settings(deadline=None, max_examples=40)  # PyYAML's own reading takes the time
def test_a_changed_copy_differs_in_what_was_changed_alone(values: dict[str, Any], other: float) -> None:
    import yaml

    for text in (yaml.safe_dump({"a": values}), json.dumps({"a": values}, indent=1)):
        known = scalars(text)
        assert known.keys() == {f"a.{key}" for key in values}
        for key in values:
            copy = yaml.safe_load(changed(text, {f"a.{key}": str(other)}))["a"]
            assert copy == {**yaml.safe_load(text)["a"], key: other}


def test_a_changed_copy_of_toml_differs_in_what_was_changed_alone() -> None:
    assert scalars(TOML, "a.toml").keys() == {
        "max_steps",
        "optimizer.lr",
        "data.batch_size",
        "schedule.warmup.warmup_steps",
    }
    other = changed(TOML, {"optimizer.lr": "3e-05", "data.batch_size": "4"}, "a.toml")
    assert other == TOML.replace("lr = 2e-3", "lr = 3.0e-05").replace('"batch_size" = 1', '"batch_size" = 4')
    assert tomllib.loads(changed("name = 'a' # b\n", {"name": "b"}, "a.toml")) == {"name": "b"}
    twice = "[a]\nlr = 1\nx = '''\n[a]\nlr = 1\n'''\n"
    assert scalars(twice, "a.toml") == {}, "nobody knows here which one counts"


def test_a_changed_copy_of_gin_differs_in_what_was_changed_alone() -> None:
    numbers = {"train.max_steps", "Adam.learning_rate", "data/loader.batch_size", "Schedule.warmup_steps", "name"}
    assert scalars(GIN, "a.gin").keys() == numbers, "no reference, macro or include"
    other = changed(GIN, {"Adam.learning_rate": "3e-05", "name": "b"}, "a.gin")
    assert other == GIN.replace("2e-3", "3.0e-05").replace("'small'", "'b'")
    assert scalars("a.b = 1\na.b = 2\n", "a.gin") == {}


YACS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--config-file")
parser.add_argument("opts", nargs=argparse.REMAINDER)
parser.parse_args()
"""


def test_a_sweep_of_a_config_file_exports_its_copy_and_a_line_that_runs_it(place: Path) -> None:
    """It ended with exit code 3, as the copy's folder was not there."""
    pytest.importorskip("yaml")
    (place / "run.log").write_text("step 1 val_loss 0.9\nstep 2 val_loss 0.8\n")
    (place / "train.py").write_text(f"{READS_YAML}\nfor n in (1, 2): print('step', n, 'val_loss', config['lr'] / n)\n")
    command = ["python", "train.py", "--config", "conf/config.yaml"]
    done = CliRunner().invoke(init, ["--log", "run.log", *command])
    assert done.exit_code == 0, done.output
    swept = CliRunner().invoke(sweep, ["--study", "mine.toml", "--trials", "2", "--parallel", "2"])
    assert swept.exit_code == 0, swept.output
    line = next(line for line in swept.output.splitlines() if line.startswith("run it")).removeprefix("run it").strip()
    ran = subprocess.run(["bash", "-c", line.replace("python", sys.executable)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "val_loss" in ran.stdout


def test_keys_of_yacs_on_the_command_count_for_more_than_those_of_the_file(place: Path) -> None:
    pytest.importorskip("yaml")
    (place / "c.yaml").write_text("SOLVER:\n  BASE_LR: 0.01\n  IMS_PER_BATCH: 16\nOUTPUT_DIR: ./out\n")
    study = begun(YACS, "--config-file", "c.yaml", "SOLVER.BASE_LR", "0.02", "OUTPUT_DIR", "out/x")
    assert study["workload"]["argv"][2:] == [
        "--config-file", "{config}", "SOLVER.BASE_LR", "{LR}", "OUTPUT_DIR", "{folder}/out",
    ]  # fmt: skip
    assert study["workload"]["config"]["values"] == {"SOLVER.IMS_PER_BATCH": "{BATCH_SIZE}"}
    assert study["search"]["enqueue"] == [{"LR": 0.02, "BATCH_SIZE": 16}]


@pytest.mark.parametrize(("lr", "marked"), [("0.05", True), ("0.002", False)])
def test_an_option_and_a_key_of_the_config_file_that_differ_are_marked(lr: str, marked: bool, place: Path) -> None:
    """Nobody knows here whether the file is laid over the options or they over it."""
    pytest.importorskip("yaml")
    (place / "c.yaml").write_text(f"lr: {lr}\n")
    begun(
        ARGPARSE.replace("parser.parse_args", "parser.add_argument('--config')\nparser.parse_args"),
        "--config",
        "c.yaml",
    )
    assert ("EDIT: the config file has lr = 0.05: fill the one that counts" in Path("mine.toml").read_text()) == marked


def test_anchors_and_tags_of_yaml_stay() -> None:
    text = "a: &rate 0.1\nb: *rate\nc: !!float 3\nd: 'x # y'  # z\n"
    assert changed(text, {"a": "0.5", "c": "4", "d": "w"}) == "a: &rate 0.5\nb: *rate\nc: !!float 4\nd: w  # z\n"


LAUNCHED = "import sys, subprocess\nsubprocess.run([sys.executable, 'train.py', *sys.argv[1:]], check=True)\n"


@pytest.mark.parametrize("launcher", [("-m", "torch.distributed.run", "--nproc_per_node=1"), ("launch.py",)])
def test_the_parser_of_a_launched_script_is_asked_not_the_launchers(launcher: tuple[str, ...], place: Path) -> None:
    pytest.importorskip("torch")
    (place / "launch.py").write_text(LAUNCHED)
    (place / "train.py").write_text(ARGPARSE + TRAINS)
    script = ("train.py",) if "-m" in launcher else ()
    done = CliRunner().invoke(init, ["python", *launcher, *script])
    assert done.exit_code == 0, done.output
    study = tomllib.loads(Path("mine.toml").read_text())
    assert study["search"]["enqueue"] == [{"LR": 0.002, "BATCH_SIZE": 1, "WARMUP_STEPS": 500}]
    assert not Path("trained").exists()


def test_a_shell_script_that_hands_nothing_on_gets_no_parameter_that_would_reach_nobody(place: Path) -> None:
    (place / "train.py").write_text(ARGPARSE + TRAINS)
    for number, (hands_on, proposed) in enumerate([("", False), (' "$@"', True)]):
        (place / "run.sh").write_text(f"{sys.executable} train.py --lr 0.1{hands_on}\n")
        done = CliRunner().invoke(init, ["--output", f"{number}.toml", "bash", "run.sh"])
        assert done.exit_code == 0, done.output
        assert ("no option was recognised" in Path(f"{number}.toml").read_text()) != proposed
    assert not Path("trained").exists()


SILENT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--lora-r", type=int)
parser.add_argument("--warmup-steps", type=int, default=0)
parser.add_argument("--seed", type=int)
parser.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.999))
parser.add_argument("--fp16", action="store_true")
parser.add_argument("data", nargs="?")
parser.parse_args()
"""


def test_what_nothing_states_today_stays_as_it_is() -> None:
    """A rank that the script chooses, a warm-up in a run of unknown length, a seed that would turn on determinism."""
    study = begun(SILENT, "--fp16", "0.5")
    assert study["workload"]["argv"] == ["python", "train.py", "--fp16", "0.5", "--lr={LR}"]
    assert study["space"].keys() == {"LR"}
    text = Path("mine.toml").read_text()
    assert "# LORA_RANK of --lora-r: not searched, as nothing states what it is today" in text


def test_the_steps_of_an_earlier_run_bound_warm_up(place: Path) -> None:
    (place / "run.log").write_text("step 30 val_loss 0.9\nstep 60 val_loss 0.8\n")
    (place / "train.py").write_text(SILENT)
    done = CliRunner().invoke(init, ["--log", "run.log", "python", "train.py"])
    assert done.exit_code == 0, done.output
    warmup = tomllib.loads(Path("mine.toml").read_text())["space"]["WARMUP_STEPS"]
    assert (warmup["low"], warmup["high"]) == (0, 30)


def test_a_script_without_a_parser_ends_at_its_optimizer() -> None:
    pytest.importorskip("torch")
    begun("import torch\ntorch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)\n")
    assert not Path("trained").exists()


TWO_STAGES = """
import argparse
first = argparse.ArgumentParser(add_help=False)
first.add_argument("--preset", default="small")
args, rest = first.parse_known_args()
second = argparse.ArgumentParser(parents=[first])
second.add_argument("--lr", type=float, default=1e-3)
second.set_defaults(lr=5e-4)
args = second.parse_args(rest)
"""


def test_of_two_parsers_the_one_that_parses_the_whole_command_counts() -> None:
    assert begun(TWO_STAGES)["search"]["enqueue"] == [{"LR": 5e-4}]


NAMES = st.sampled_from([
    "--lr", "--lora_r", "--batch_size", "--warmup_steps", "--warmup_ratio", "--lora_alpha", "--dropout",
    "--weight_decay", "--gradient_accumulation_steps", "--adam_beta2", "--warmup",
])  # fmt: skip
NUMBERS = st.integers(-5, 10**6).map(str) | st.floats(-1, 10).map(repr) | st.sampled_from(["", "None", "1e-3f", "auto"])


@given(NAMES, NUMBERS, st.none() | st.integers(1, 10**5))
def test_every_range_contains_what_is_set_today(name: str, value: str, steps: int | None) -> None:
    for proposal in propose([Option(flag=name, value=value)], steps):
        wide = re.search(r"\{.*\}", f"{proposal.toml} {proposal.why}")
        assert wide is not None
        space = tomllib.loads(f"x = {wide[0]}")["x"]
        today = tomllib.loads(f"x = {proposal.today}")["x"]
        assert float(today) == float(value.rstrip("f")), "to the last digit"
        if "choices" in space:
            assert today in space["choices"]
        else:
            assert space["low"] <= today <= space["high"]
            assert not (today - space["low"]) % space.get("step", 1) or space["type"] == "float"
            assert space["high"] < steps if steps and name == "--warmup_steps" and "step" in space else True
