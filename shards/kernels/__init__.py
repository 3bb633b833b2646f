"""Kernels of a GPU that do in one launch what architectures do in many. Begin with `fused.py`: which modules they stand
in for, and how that is checked; what is named `triton_` is imported only where there is such a device."""
