"""Nodes: machines whose owners let this gateway's operator command them, and those that registered for it.

Begin with `node_admin.py`; `node_routes.py` has the paths under `/admin/v1`, `node_store.py` what is remembered.
"""
