"""Whose requests these are: keys, what each may do and use, and what was used, in a database that gateways share.

Begin in `gatekeeper.py`; `api_keys.py` and `quota_levels.py` are its values, `schema.py` its tables.
"""
