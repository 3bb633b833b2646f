"""What only code for this very processor does fast: steps of one token, on processors where a compiler is installed.

Begin with `one_row.c`: its products read weights as fast as memory delivers them. `compiling.py` makes a library of it,
and `one_row.py` calls it; where either cannot be done, torch's products are used as before.
"""
