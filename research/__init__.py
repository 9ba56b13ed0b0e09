"""Experiments on learning: outside the package, for those who want to repeat or extend them."""
