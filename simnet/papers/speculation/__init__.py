"""Two ways to guess that the product does not take, against the one that it takes: trees of guesses (SpecInfer), and
steps that are sent before the last came back (PipeInfer). Nothing but decision 0056 depends on it.

`python -m molink.simnet.papers.speculation` prints the table. Begin with `variants.py`.
"""
