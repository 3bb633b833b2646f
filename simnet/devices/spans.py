"""Which layers each machine of a simulated circuit has. Pure."""

from itertools import pairwise

from molink.shards.spec import Span


def even_spans(layers: int, peers: int) -> tuple[Span, ...]:
    """The model's layers in as many spans as there are peers.

    Raises:
        ValueError: there are more peers than layers, or none.
    """
    if not 1 <= peers <= layers:
        raise ValueError(f"{layers} layers can be split among 1 to {layers} peers, not {peers}")
    base, longer = divmod(layers, peers)
    starts = [peer * base + min(peer, longer) for peer in range(peers + 1)]
    return tuple(Span(start, stop) for start, stop in pairwise(starts))
