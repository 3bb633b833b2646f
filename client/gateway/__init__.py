"""`molink-gateway`: HTTP APIs over a swarm.

Begin with `app.py`, the routes, and `generating.py`, their work; `apis/` has each API's requests and answers, and
`server.py` keeps order among connections.
"""
