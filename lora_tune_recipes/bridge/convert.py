"""Write a base in Megatron-Bridge's own form, as MLPerf v6.0 loads it, from a Hugging Face or a NeMo 2 folder.

    python -m lora_tune_recipes.bridge.convert MODEL OUT

OUT then holds ``iter_0000000`` with the distributed weights and ``run_config.yaml``, and the files that name it the
latest iteration. Runs on the CPU, and needs as much host memory as the model in bf16. The shape of a NeMo folder is
not read from it: set LLAMA and its sizes, as for the recipes.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from lora_tune.base.errors import InputError, LoraTuneError
from lora_tune_recipes.bridge import imports
from lora_tune_recipes.knobs import Knobs
from lora_tune_recipes.megatron import checkpoint, hf
from lora_tune_recipes.megatron.shapes import read_shape


def convert(source: Path, out: Path, *, dtype_name: str = "bfloat16") -> None:
    """Read ``source`` and write ``out``. Raises InputError if either cannot be used."""
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out}: is not empty; name a new folder")
    shape = hf.shape_of(source) if hf.is_hf(source) else read_shape(Knobs(os.environ))
    checkpoint.check(source, shape)
    imports.prepare()
    import torch
    from megatron.bridge.models.gpt_provider import GPTModelProvider, transformer_engine_layer_spec
    from megatron.bridge.training.model_load_save import save_megatron_model, temporary_distributed_context

    from lora_tune_recipes.bridge import base
    from lora_tune_recipes.bridge.model import llama

    dtype = getattr(torch, dtype_name)
    provider = GPTModelProvider(
        **llama(shape, seq=4096), params_dtype=dtype, pipeline_dtype=dtype, use_cpu_initialization=True
    )
    provider.finalize()
    with temporary_distributed_context(backend="gloo"):
        models = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
        base.load(models, source, shape)
        # run_config.yaml names the layer function: use the one that the loading run will have.
        provider.transformer_layer_spec = transformer_engine_layer_spec
        save_megatron_model(models, out, ckpt_format="torch_dist")


def main() -> int:
    """Parse the command line and convert."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="Hugging Face or NeMo 2 folder")
    parser.add_argument("out", type=Path, help="folder to write; created")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default %(default)s")
    options = parser.parse_args()
    try:
        convert(options.model, options.out, dtype_name=options.dtype)
    except LoraTuneError as error:
        print(f"convert: {error}", file=sys.stderr)
        return error.exit_code
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
