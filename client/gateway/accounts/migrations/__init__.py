"""Migrations of the gateway's database. Begin in `migrating.py`, which has alembic run them.

`versions/` has one file for each revision, and `env.py` is what alembic runs for it.
"""
