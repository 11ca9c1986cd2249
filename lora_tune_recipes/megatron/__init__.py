"""What the recipes on Megatron-Core share: NeMo 2's (``recipes.nemo``) and Megatron-Bridge's (``recipes.bridge``).

Neither NeMo nor Megatron-Bridge is imported here: the two cannot live in one environment.
"""
