"""The parts of the Megatron-Bridge trial; ``lora_tune_recipes.bridge_lora`` runs it.

``settings`` imports neither torch nor Megatron-Bridge; import ``imports`` before ``megatron.bridge``.
"""
