"""The records as Optuna's own tables, one way: for optuna-dashboard, and for every other program that reads studies."""
