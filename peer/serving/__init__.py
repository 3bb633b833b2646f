"""What arrives on a peer's links and who is let in: admission, neighbours of circuits, layers, files by hash.

Begin with `data_plane.py`, which puts it together; `service.py` says where each frame goes.
"""
