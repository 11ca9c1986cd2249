"""A model of whole configurations: every parameter may drive speed, convergence or both, and data say which."""
