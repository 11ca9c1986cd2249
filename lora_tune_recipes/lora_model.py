"""The base model from its checkpoint folder, with LoRA adapters on the attention's projections."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import __version__ as installed
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from lora_tune.base.errors import InputError, SetupError
from lora_tune_recipes import text
from lora_tune_recipes.ranks import precision
from lora_tune_recipes.settings import Settings

TENSOR_PARALLEL_SINCE = (5, 23)
"""First release of transformers in which tensor parallelism trained with peft's adapters; 5.17 did not."""


def build(settings: Settings) -> Any:
    """The base of ``load_base`` with fresh adapters in float32, initialized from ``settings.seed``."""
    base = load_base(settings)
    check_modules_to_save(leaf_names(base), settings)
    adapters = lora_config(settings, target_names(adaptable_names(base), settings.adapters.targets))
    with warnings.catch_warnings():
        # transformers 5.23 deprecates names that peft 0.21 uses, and 5.17 lacks their replacements.
        warnings.simplefilter("ignore", FutureWarning)
        if settings.recompute:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        model = get_peft_model(base, adapters)
    _widths(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # peft leaves whole modules in the base's precision
    _initialize(model, settings.seed)
    return model


def lora_config(settings: Settings, modules: Sequence[str]) -> LoraConfig:
    """peft's config for adapters of ``modules`` (full names)."""
    return LoraConfig(
        base_model_name_or_path=str(settings.model),
        task_type="CAUSAL_LM",
        r=settings.adapters.rank,
        lora_alpha=settings.adapters.alpha,
        lora_dropout=settings.adapters.dropout,
        target_modules=list(modules),
        rank_pattern=dict(settings.adapters.rank_pattern),
        alpha_pattern=dict(settings.adapters.alpha_pattern),
        modules_to_save=list(settings.adapters.modules_to_save) or None,
        use_rslora=settings.adapters.rslora,
        use_dora=settings.adapters.dora,
    )


def _config(settings: Settings) -> Any:
    try:
        config = AutoConfig.from_pretrained(settings.model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(f"MODEL={str(settings.model)!r}: no usable config.json: {_line(error)}") from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InputError(f"MODEL={str(settings.model)!r}: model_type {config.model_type!r}; allowed are causal models")
    if config.model_type != "llama" and (settings.tp > 1 or settings.cp > 1):
        raise InputError(f"MODEL={str(settings.model)!r}: {config.model_type}: TP and CP are for llama alone")
    check_positions(config, settings)
    if settings.tp > 1 and config.num_key_value_heads % settings.tp:
        raise InputError(
            f"TP={settings.tp}: allowed is a divisor of the model's {config.num_key_value_heads} key-value heads"
        )
    return config


def check_positions(config: Any, settings: Settings) -> None:
    """Raise InputError for sequences longer than the model's positions."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", settings.seq)
    if settings.seq > positions:
        raise InputError(f"SEQ={settings.seq}: allowed is at most the model's {positions} positions")


def load_base(settings: Settings) -> Any:
    """The model of the checkpoint folder, in its compute precision.

    Raises InputError if the folder holds no causal model, or weights that do not match its config.
    """
    config = _config(settings)
    where = f"MODEL={str(settings.model)!r}"
    logging.disable_progress_bar()
    try:
        base, report = AutoModelForCausalLM.from_pretrained(
            settings.model,
            config=config,
            dtype=torch.bfloat16 if precision(settings) == "bf16" else torch.float32,
            attn_implementation=settings.attn,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # so that the report below names them
            output_loading_info=True,
            **_distribution(settings),
            **_quantization(settings),
        )
    except ImportError as error:
        raise SetupError(f"ATTN={settings.attn!r}: {_line(error)}") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{where}: weights not loaded: {_line(error)}") from error
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if report[kind]:
            first = sorted(map(str, report[kind]))[0]
            raise InputError(f"{where}: weights do not fit config.json: {len(report[kind])} {kind}, such as {first}")
    base.config.use_cache = False
    for module in base.modules():
        # On some CPUs bitsandbytes' layers would convert their weights at the first evaluation to a bfloat16 layout
        # that training cannot read, and that widths other than multiples of 32 lack.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return base


def linear_names(model: Any) -> list[str]:
    """The full names of the model's linear layers, in the model's order."""
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


def adaptable_names(model: Any) -> list[str]:
    """Linear layers and embeddings, as :func:`linear_names`: peft adapts both."""
    kinds = torch.nn.Linear, torch.nn.Embedding
    return [name for name, module in model.named_modules() if isinstance(module, kinds)]


def target_names(linear: Sequence[str], targets: Sequence[str]) -> list[str]:
    """The full names among ``linear`` whose last part is in ``targets``.

    Raises InputError for a target that matches none.
    """
    there = {name.rpartition(".")[2] for name in linear}
    if absent := set(targets) - there:
        allowed = ", ".join(sorted(there))
        raise InputError(f"LORA_TARGETS: no adapter fits a layer {min(absent)} of this model; allowed are {allowed}")
    return [name for name in linear if name.rpartition(".")[2] in targets]


def adapters_fit_shares() -> bool:
    """Whether the installed transformers supports LoRA adapters under tensor parallelism."""
    return tuple(map(int, installed.split(".")[:2])) >= TENSOR_PARALLEL_SINCE


def _distribution(settings: Settings) -> dict[str, Any]:
    """Arguments that shard the base over the ranks. Raises SetupError if adapters do not support it."""
    if settings.tp == 1:
        return {}
    if not adapters_fit_shares():
        raise SetupError(
            f"TP={settings.tp}: transformers {installed} is here; allowed is TP=1, or transformers 5.23"
            " and later, whose layers take LoRA adapters under tensor parallelism"
        )
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=settings.tp)}


def _quantization(settings: Settings) -> dict[str, Any]:
    """Arguments that load the base in 4 bits (QLoRA). Raises SetupError if bitsandbytes is not installed."""
    kind = settings.load_in_4bit
    if not kind:
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise SetupError(
            f"LOAD_IN_4BIT={kind!r}: bitsandbytes is not here; pip install 'lora-tune[qlora]', or leave it unset"
        )
    from transformers import BitsAndBytesConfig

    compute = torch.bfloat16 if precision(settings) == "bf16" else torch.float32
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=compute)
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    return {"quantization_config": config, "device_map": {"": device}}


def leaf_names(model: Any) -> list[str]:
    """The full names of the modules without children."""
    return [name for name, module in model.named_modules() if not list(module.children())]


def check_modules_to_save(leaves: Sequence[str], settings: Settings) -> None:
    """Raise InputError for a whole-trained module that is not among ``leaves``, or that also has an adapter."""
    adapters = settings.adapters
    there = {name.rpartition(".")[2] for name in leaves}
    if absent := set(adapters.modules_to_save) - there:
        allowed = ", ".join(sorted(there))
        raise InputError(f"MODULES_TO_SAVE: this model has no module {min(absent)}; allowed are {allowed}")
    if twice := set(adapters.modules_to_save) & set(adapters.targets):
        raise InputError(f"MODULES_TO_SAVE: {min(twice)} is in LORA_TARGETS; allowed is one of the two")


def _widths(model: Any) -> None:
    """Set the adapter layers' widths to the global ones under tensor parallelism.

    transformers 5.23 reads them; peft 0.21 stores this rank's share there.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and isinstance(module.weight, DTensor):
            module.out_features, module.in_features = module.weight.shape


@torch.no_grad()
def _initialize(model: Any, seed: int) -> None:
    """Set every A to the seed's values and every B to zero, also for shards."""
    named = list(model.named_parameters())
    reducing = [parameter for name, parameter in named if "lora_A" in name]
    for parameter, whole in zip(reducing, initial_weights([tuple(p.shape) for p in reducing], seed), strict=True):
        value = whole.to(parameter.device, parameter.dtype)
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(value)
    for name, parameter in named:
        if "lora_B" in name:
            parameter.zero_()
        elif "lora_embedding_B" in name:
            parameter.copy_(initial_embedding(tuple(parameter.shape), seed))


def initial_embedding(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Initial B factor [width, rank] of an embedding's adapter; as in peft, its A factor starts at zero.

    Standard normal, and like :func:`initial_weights` the same on every layout and device.
    """
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))


def initial_weights(shapes: Sequence[tuple[int, ...]], seed: int) -> list[torch.Tensor]:
    """The adapters' A matrices [rank, width] in the order of the model's layers; the B matrices start at zero.

    peft's distribution, uniform within 1/sqrt(width). Drawn in float32 on the CPU from a separate generator, so the
    values are the same for every layout, device and precision.
    """
    generator = torch.Generator().manual_seed(seed)
    bounds = [1.0 / math.sqrt(shape[1]) for shape in shapes]
    return [torch.empty(s).uniform_(-b, b, generator=generator) for s, b in zip(shapes, bounds, strict=True)]


def tokenizer(folder: Path) -> text.Tokenize:
    """The checkpoint's tokenizer; bytes if it ships none."""
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer.model").is_file():
        return text.byte_tokens
    from transformers import AutoTokenizer  # imported here, because it takes half a second

    own = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return lambda stream: list(own(stream, add_special_tokens=False).input_ids)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
