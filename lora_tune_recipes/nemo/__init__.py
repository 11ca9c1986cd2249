"""The parts of the NeMo trial; ``lora_tune_recipes.nemo_lora`` runs it.

``settings`` imports neither torch nor NeMo.
"""
