"""Identities of peers, the files that keep their secrets, and the addresses that may be dialled or passed on.

Begin with `identity.py`; `addresses.py` and `dialable.py` check what people type and strangers announce.
"""
