"""The parts of the NeMo trial; ``lora_tune.recipes.nemo_lora`` runs it.

``settings`` imports neither torch nor NeMo.
"""
