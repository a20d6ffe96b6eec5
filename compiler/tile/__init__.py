"""The tile layer: what kernels are written with, between the IR and the families."""
