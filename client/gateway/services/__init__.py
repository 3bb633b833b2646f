"""Services: a model under a name of its own, with circuits that are held for it, as an operator deploys them.

Begin with `service.py`, the values, and `service_keeper.py`, which does what the database says; `service_routes.py` has
the paths under `/admin/v1`.
"""
