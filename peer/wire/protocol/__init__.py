"""What goes over a link, byte by byte: frames, packets and the messages of `molink.proto`.

Begin with `frames.py`, what is said, and `packets.py`, how it is cut; docs/PROTOCOL.md has the vectors.
"""
