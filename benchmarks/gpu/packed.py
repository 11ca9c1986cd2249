"""Packed trials on one GPU, measured: ``python -m benchmarks.gpu.packed --out FILE [--base FOLDER] PART...``

    speed      trials x steps a second of a pack of K against a pack of one, for each shape; memory, share of peak
    variants   the same of a 1 B model with LoRA, DoRA, and adapters of the embeddings, with and without dropout
    equality   the eval losses of trials in a pack with joins and leaves at random, against the same trials alone,
               beside the differences between two seeds
    trials     whole trials an hour of the small base: in a pack, one process each, in a warm worker
    large      the same of a larger model with random weights: sequences of 512, batches of 4, 60 steps

Every part prints its table; FILE holds the numbers. Speeds are of random weights and random tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.trials_of_pack import LARGE, PEAK, SMALL, peak_share
from lora_tune.base.paths import AttemptPaths
from lora_tune.launchers.pack_folder import PackFolder
from lora_tune.workloads.base import Job
from lora_tune.workloads.base import SlotTerms as JobSlot
from lora_tune_recipes import settings as knobs
from lora_tune_recipes.megatron.shapes import SHAPES, Shape
from lora_tune_recipes.packed.base import PackedBase
from lora_tune_recipes.packed.pack import Pack
from lora_tune_recipes.packed.slot import Slot, Texts
from lora_tune_recipes.settings import Settings
from lora_tune_recipes.text import Sequences

Knobs = dict[str, object]
WARM_UP, ROUNDS = 3, 8
CASES = {
    "small": [(512, 8, (1, 4, 16, 64))],
    "1b": [(512, 4, (1, 2, 4, 16)), (512, 8, (1, 8))],
    "8b": [(512, 4, (1, 2, 4)), (1024, 8, (1, 2))],
    "tiny": [(64, 4, (1, 4))],
}
"""Shape -> sequence length, batch, slots."""
WIDE = {"1b": [(512, 4, (1, 16))], "tiny": [(64, 4, (1, 4))]}
"""The same for the ``variants`` part."""
VARIANTS: dict[str, Knobs] = {
    "LoRA": {},
    "LoRA, no dropout": {"LORA_DROPOUT": 0},
    "DoRA": {"DORA": 1},
    "DoRA, no dropout": {"DORA": 1, "LORA_DROPOUT": 0},
    "LoRA and embeddings": {"LORA_TARGETS": "q_proj,k_proj,v_proj,o_proj,embed_tokens"},
}


def settings_of(**changed: object) -> Settings:
    return knobs.read({name: str(value) for name, value in changed.items()})


def random_llama(shape: Shape, positions: int) -> Any:
    """A model of this shape with random weights, in bfloat16 on the GPU where there is one."""
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_groups,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
    )
    cuda = torch.cuda.is_available()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if cuda else torch.float32)
    try:
        with torch.device("cuda" if cuda else "cpu"):
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def random_base(name: str, positions: int) -> PackedBase:
    model = random_llama(SHAPES[name], positions)
    with mock.patch("lora_tune_recipes.packed.base.load_base", return_value=model):
        return PackedBase(settings_of())


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rounds_per_second(base: PackedBase, settings: Sequence[Settings], vocabulary: int) -> tuple[float, float]:
    """Of a pack of these trials on random tokens, and the most memory that it took, GiB."""
    rng, seq = np.random.default_rng(0), settings[0].seq
    tokens = Sequences(rng.integers(0, vocabulary, (256, seq + 1)), np.ones((256, seq), np.bool_))
    pack = Pack(base)
    for one in settings:
        pack.join(Slot(one, Texts(tokens, tokens)))
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP):
        pack.round()
    synchronize()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        pack.round()
    synchronize()
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return ROUNDS / seconds, peak


def variants(names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """As :func:`speed`, for each kind of adapter."""
    found = {}
    for variant, common in VARIANTS.items():
        print(variant, flush=True)
        found[variant] = speed([name for name in names if name in WIDE], WIDE, common)
    return found


def speed(names: Sequence[str], cases: Mapping[str, Any], common: Mapping[str, object]) -> list[dict[str, Any]]:
    """A row for each shape, batch and number of slots; ``common``: knobs of all trials."""
    rows = []
    for name in names:
        shape = SHAPES[name]
        base = random_base(name, max(seq for seq, _, _ in cases[name]) + 1)
        for seq, batch, widths in cases[name]:
            single = 0.0
            for width in widths:
                own = {**common, "SEQ": seq, "MINIBS": batch, "MAX_STEPS": 1000}
                trials = [settings_of(**own, SEED=i) for i in range(width)]
                try:
                    rate, gib = rounds_per_second(base, trials, shape.vocab)
                except torch.OutOfMemoryError:
                    print(f"{name} {seq} x {batch}: {width} slots do not fit", flush=True)
                    torch.cuda.empty_cache()
                    break
                single = single or rate
                flops = shape.step_flops(width * batch * seq, seq) * rate
                row = {
                    "shape": name,
                    "seq": seq,
                    "batch": batch,
                    "slots": width,
                    "trial_steps_per_second": width * rate,
                    "gain": width * rate / single,
                    "gib": gib,
                    "peak_share": flops / PEAK,
                }
                rows.append(row)
                print(
                    f"{name} {seq} x {batch}, {width:3} slots: {width * rate:8.1f} trial steps/s, "
                    f"{row['gain']:5.2f}x, {gib:6.1f} GiB, {100 * row['peak_share']:4.1f}% of peak",
                    flush=True,
                )
        del base
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return rows


def trial_of(number: int, steps: int, model: Path) -> dict[str, object]:
    """Trial ``number`` of the equality part: ranks 4 to 64, rates over a decade, batches of 4 and 8."""
    rng = random.Random(number)
    return {
        "MODEL": model,
        "SEQ": 256,
        "MAX_STEPS": steps,
        "EVAL_SAMPLES": 64,
        "SEED": number,
        "LORA_RANK": (4, 8, 16, 32, 64)[number % 5],
        "MINIBS": rng.choice((4, 8)),
        "LR": 10 ** rng.uniform(-3.5, -2.5),
        "WARMUP_STEPS": rng.choice((0, 10)),
    }


def alone(base: PackedBase, settings: Settings) -> float:
    """The eval loss at the end of the trial in a pack of one."""
    pack, slot = Pack(base), Slot(settings, base.texts(settings))
    pack.join(slot)
    while slot.step < settings.max_steps:
        pack.round()
    return pack.evaluate([slot])[0]


def together(base: PackedBase, trials: Sequence[Settings]) -> list[float]:
    """The eval losses of the trials in one pack that they join and leave, and come back to, at random."""
    chance, pack = random.Random(0), Pack(base)
    slots = [Slot(one, base.texts(one)) for one in trials]
    waiting = dict.fromkeys(slots)
    states: dict[Slot, Any] = {}
    losses: dict[Slot, float] = {}
    while len(losses) < len(slots):
        for slot in [slot for slot in waiting if chance.random() < 0.2]:
            del waiting[slot]
            pack.join(slot, states.pop(slot, None))
        for slot in list(pack.round()) if pack.slots else ():
            if slot.step == slot.settings.max_steps:
                losses[slot] = pack.evaluate([slot])[0]
                pack.leave(slot)
            elif chance.random() < 0.01:
                states[slot] = pack.leave(slot)
                waiting[slot] = None
    return [losses[slot] for slot in slots]


def equality(model: Path, count: int, steps: int, of_all: Knobs) -> dict[str, Any]:
    """Quantiles of the differences: packed against alone, seed against seed. of_all: knobs of every trial."""
    trials = [settings_of(**{**trial_of(i, steps, model), **of_all}) for i in range(count)]
    reseeded = [settings_of(**{**trial_of(i, steps, model), **of_all, "SEED": i + 10_000}) for i in range(count)]
    base = PackedBase(trials[0])
    began = time.perf_counter()
    single = [alone(base, one) for one in trials]
    alone_seconds, began = time.perf_counter() - began, time.perf_counter()
    packed = together(base, trials)
    packed_seconds = time.perf_counter() - began
    other = together(base, reseeded)
    print(f"{count} trials of {steps} steps: alone {alone_seconds:.1f} s, packed {packed_seconds:.1f} s", flush=True)
    found: dict[str, Any] = {"alone_seconds": alone_seconds, "packed_seconds": packed_seconds}
    for name, losses in (("packed against alone", packed), ("two seeds", other)):
        gaps = sorted(abs(a - b) for a, b in zip(single, losses, strict=True))
        quantiles = {"median": statistics.median(gaps), "90%": gaps[int(0.9 * len(gaps))], "largest": gaps[-1]}
        found[name] = quantiles
        print(f"{name}: " + ", ".join(f"{key} {value:.2g}" for key, value in quantiles.items()), flush=True)
    return found


def variables(common: Knobs, number: int) -> dict[str, str]:
    """The knobs of trial ``number``: ``common``, a seed and a learning rate."""
    lr = 10 ** random.Random(number).uniform(-3.5, -2.5)
    given = {"TARGET": 0.01, **common, "SEED": number, "LR": lr}
    return {name: str(value) for name, value in given.items()}


def packed_seconds(common: Knobs, count: int) -> float:
    """From the start of the program to the end of the last of ``count`` trials in one pack."""
    with tempfile.TemporaryDirectory() as root:
        folder = PackFolder(Path(root) / "pack")
        folder.make()
        for i in range(count):
            place = Path(root) / f"{i}"
            place.mkdir()
            slot = JobSlot(argv=(), knobs=variables(common, i))
            folder.ask(Job(name=f"t-{i}-0", folder=place, argv=(), log=AttemptPaths(place).log, slot=slot))
        began = time.perf_counter()
        command = [sys.executable, "-m", "lora_tune_recipes.packed_lora", str(folder.paths.folder), "--idle", "0"]
        subprocess.run(command, check=True)
        seconds = time.perf_counter() - began
        codes = [json.loads((Path(root) / f"{i}" / "ended.json").read_text())["exit_code"] for i in range(count)]
        assert codes == [0] * count, codes
    return seconds


def process(
    module: str, common: Knobs, number: int, environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", module],
        env={**os.environ, **variables(common, number), **(environment or {})},
        stdout=subprocess.DEVNULL,
    )


def one_at_a_time(common: Knobs, count: int, environment: dict[str, str] | None = None) -> float:
    """Mean seconds of a trial of the PEFT recipe in a process of its own."""
    began = time.perf_counter()
    for i in range(count):
        assert process("lora_tune_recipes.peft_lora", common, i, environment).wait() == 0
    return (time.perf_counter() - began) / count


@contextmanager
def warm_worker() -> Iterator[dict[str, str]]:
    """The environment of trials that a worker serves."""
    with tempfile.TemporaryDirectory() as root:
        socket = Path(root) / "socket"
        command = [sys.executable, "-m", "lora_tune_recipes.warm_worker", "--socket", str(socket)]
        worker = subprocess.Popen([*command, "lora_tune_recipes.training"], stdout=subprocess.DEVNULL)
        try:
            end = time.monotonic() + 120
            while not socket.exists() and worker.poll() is None and time.monotonic() < end:
                time.sleep(0.1)
            yield {"LORA_TUNE_WORKER": str(socket)}
        finally:
            worker.terminate()
            worker.wait()


def trials(shape: Shape, common: Knobs, slots: Sequence[int], single: int) -> dict[str, float]:
    """Trials an hour in each way, and of the peak of a GPU what their training passes are; ``shape``: of their base.

    single: trials one after another.
    """
    found: dict[str, float] = {}

    def note(name: str, per_hour: float) -> None:
        found[name] = per_hour
        share = peak_share(shape, common, per_hour)
        print(f"{name}: {per_hour:.0f} trials an hour, {share:.1%} of the peak", flush=True)

    for count in slots:
        note(f"a pack of {count}", 3600 * count / packed_seconds(common, count))
    note("one process each", 3600 / one_at_a_time(common, single))
    with warm_worker() as environment:
        note("warm worker", 3600 / one_at_a_time(common, single + 1, environment))
    return found


def large(name: str, slots: Sequence[int], single: int) -> dict[str, float]:
    """Trials an hour of a model of shape ``name`` with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        random_llama(SHAPES[name], 1024).to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
        torch.cuda.empty_cache()
        return trials(SHAPES[name], {**LARGE, "MODEL": folder}, slots, single)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("speed", "variants", "equality", "trials", "large"))
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the numbers")
    parser.add_argument("--base", type=Path, default=knobs.TINY, help="base of the trials (default: the shipped one)")
    parser.add_argument("--shapes", nargs="+", default=["small", "1b", "8b"], choices=sorted(CASES))
    parser.add_argument("--count", type=int, default=64, help="trials of the equality part (default %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="their steps (default %(default)s)")
    parser.add_argument(
        "--knobs", nargs="+", default=[], help="of each of them, such as LOAD_IN_4BIT=nf4 MODULES_TO_SAVE=norm"
    )
    parser.add_argument("--large", default="1b", choices=sorted(SHAPES), help="shape of the large part")
    parser.add_argument("--slots", type=int, nargs="+", help="packs of the trials (16 and 64) and large (16) parts")
    parser.add_argument("--single", type=int, default=2, help="trials one after another (default %(default)s)")
    options = parser.parse_args()
    made: dict[str, Callable[[], Any]] = {
        "speed": lambda: speed(options.shapes, CASES, {}),
        "variants": lambda: variants(options.shapes),
        "equality": lambda: equality(
            options.base, options.count, options.steps, dict(knob.split("=", 1) for knob in options.knobs)
        ),
        "trials": lambda: trials(
            Shape.from_config(json.loads((options.base / "config.json").read_text())),
            {**SMALL, "MODEL": options.base},
            options.slots or [16, 64],
            options.single,
        ),
        "large": lambda: large(options.large, options.slots or [16], options.single),
    }
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    found: dict[str, Any] = {"device": device, "torch": torch.__version__}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        print(f"-- {part}", flush=True)
        found[part] = made[part]()
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
