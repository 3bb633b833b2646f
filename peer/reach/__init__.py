"""What a peer does so that it can be reached, and what it does for those that cannot: the relay that it offers, its
stays at the relays of others, and what it knows of its own addresses. Begin with `relay.py` and `reachability.py`.
"""
