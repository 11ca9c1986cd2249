"""Code shared by the recipes on Megatron-Core: NeMo 2's (``recipes.nemo``) and Megatron-Bridge's (``recipes.bridge``).

Imports neither of the two, because they cannot be installed in one environment.
"""
