"""`python -m molink.peer.ranks`: one rank of a peer on several devices (`process.py`)."""

from molink.shards.loading.lean_transformers import load_lean_transformers

load_lean_transformers()

from molink.peer.ranks.process import main  # noqa: E402 - it imports transformers

main()
