"""The sampler of lora_tune in OptunaHub's form."""

from lora_tune.search.grey_box.sampler import GreyBoxSampler

__all__ = ["GreyBoxSampler"]
