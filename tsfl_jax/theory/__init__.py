"""Theorems 1 to 4 of the paper, and the weights that minimize its bound."""
