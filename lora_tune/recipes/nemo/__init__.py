"""The parts of the NeMo trial; ``lora_tune.recipes.nemo_lora`` runs it.

``settings``, ``shapes``, ``schedule``, ``processes`` and ``checkpoint`` import neither torch nor NeMo at module level.
"""
