"""The data plane of a peer: sessions let in, steps computed, and what they give sent on."""
