"""`python -m molink.peer`: the same as `molink-peer`, for where scripts are not on the path."""

from molink.programs import molink_peer

molink_peer()
