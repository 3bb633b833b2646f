"""What a head guesses of the tokens that come next, so that a trip round the circuit yields several. Pure.

Begin with `session_guesses.py`; `guess_count.py` decides how many travel, the others are where guesses come from.
"""
