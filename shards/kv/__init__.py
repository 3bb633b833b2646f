"""The KV cache: blocks of keys and values, whose they are, where they lie, and which sessions share them.

Begin with `kv_pool.py`, the owner of all of it; `block_allocator.py` and `extents.py` decide, without torch.
"""
