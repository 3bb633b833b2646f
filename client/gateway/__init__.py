"""`molink-gateway`: OpenAI's HTTP API over a swarm.

Begin with `app.py`, the routes; `server.py` keeps order among connections and `openai.py` reads requests.
"""
