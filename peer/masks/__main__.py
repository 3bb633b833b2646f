"""`python -m molink.peer.masks`: the process that follows grammars (`process.py`)."""

from molink.peer.masks.process import main

main()
