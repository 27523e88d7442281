"""Sampling and training side by side: which positions of the data are open, and which a batch takes."""
