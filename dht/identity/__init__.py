"""Who a peer is, what its secrets are kept in, and which addresses may be dialled or passed on.

Begin with `identity.py`; `addresses.py` and `dialable.py` check what people type and strangers announce.
"""
