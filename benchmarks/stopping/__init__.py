"""The stopping rule beside others: good runs stopped, bad runs caught, and what those cost, on tables of whole runs."""
