"""`python -m molink.client.gateway`: the same as `molink-gateway`, for where scripts are not on the path."""

from molink.programs import molink_gateway

molink_gateway()
