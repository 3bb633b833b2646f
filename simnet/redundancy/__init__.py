"""The redundancy paper (AcceLLM) in virtual time: instances of several accelerators that share requests, or do not."""
