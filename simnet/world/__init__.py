"""A world in virtual time: SimPy's events, lines, and peers that decide with the product's own objects."""
