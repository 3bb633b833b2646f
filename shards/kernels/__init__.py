"""What architectures do in many operations, in few: kernels of a GPU, and whole layers on processors.

Begin with `fused.py`: which modules the kernels stand in for, and how that is checked; what is named `triton_` is
imported only where there is such a device.
"""
