"""Products with weights in the fastest way that was measured, and weights in 8 or 4 bits.

Begin with `linear.py` for the first and `quantize.py` for the second; `products.py` has the ways.
"""
