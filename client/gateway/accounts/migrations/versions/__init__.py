"""Revisions of the gateway's database, one file each, in their order. One that was released is not changed any more."""
