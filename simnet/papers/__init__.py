"""What only reproduces a paper or compares with one; nothing but the command line imports it.

Begin with the `command.py` of the paper that you want.
"""
