"""`python -m molink.client`: the same as `molink`, for where scripts are not on the path."""

from molink.programs import molink

molink()
