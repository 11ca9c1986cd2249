"""When a sweep ends by itself and how good it is then: ``python -m benchmarks.stop_below [SITES]``.

The real driver on the virtual clock, the H100 surface of several sites, ``stop_below = 0.002`` and four trials at a
time. Prints node-hours at the end, why it ended, and the true regret of what the sampler then recommends.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import platform
import sys
import tempfile
from datetime import date
from pathlib import Path

import numpy as np
from click.testing import CliRunner

from benchmarks.laboratory.problems import h100_wide
from lora_tune.cli.options import sweep_paths
from lora_tune.cli.sweep import main as sweep
from lora_tune.config.study import load_study
from lora_tune.search.grey_box.sampler import GreyBoxSampler
from lora_tune.search.recorded import in_memory
from lora_tune.search.samplers import make_sampler
from lora_tune.store.locate import open_store

STUDY = Path(__file__).resolve().parent.parent / "studies" / "simulated_h100.toml"


def run(site: int, folder: Path) -> tuple[float, float, str]:
    """(node-hours, true regret of the recommendation, the sweep's own reason) of one sweep."""
    module, file = folder / f"site{site}.py", folder / f"site{site}.toml"
    module.write_text(
        f"from lora_tune.launchers.simulated.h100 import function as h100\n\nfunction = h100.variant({site})\n"
    )
    text = STUDY.read_text(encoding="utf-8").replace('surface = "h100"', f'surface = "{module}:function"')
    text = text.replace("node_hours = 15\nparallel = 8", "node_hours = 60\nparallel = 4\nstop_below = 0.002")
    file.write_text(text, encoding="utf-8")
    said = CliRunner().invoke(sweep, ["--study", str(file), "--output", str(folder / f"out{site}"), "--quiet"])
    study = load_study(file)
    store = open_store(sweep_paths(study.name, folder / f"out{site}"), None)
    records = store.load(study.name)
    store.close()
    assert records is not None, said.output
    sampler = make_sampler(study)
    assert isinstance(sampler, GreyBoxSampler)
    tuned, _, _ = sampler.recommend(in_memory(study, records, sampler))
    reason = next((line for line in said.output.splitlines() if line.strip()), "")
    return records.node_hours(0.0), h100_wide(site).regret(tuned), reason


def main() -> None:
    sites = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    print(f"{date.today()}, {platform.machine()}, one core, stop_below = 0.2% a node-hour, at most 60 node-hours")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for site in range(1, sites + 1):
            hours, regret, reason = run(site, Path(folder))
            found.append((hours, regret))
            print(f"site {site}: {hours:.1f} node-hours, regret {100 * regret:.1f}%; {reason}", flush=True)
    hours, regrets = np.array(found).T
    middle, typical, worst = np.median(hours), 100 * np.median(regrets), 100 * regrets.max()
    print(f"median {middle:.1f} node-hours, regret {typical:.1f}%, worst {worst:.1f}%")


if __name__ == "__main__":
    main()
