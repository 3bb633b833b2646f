"""Memory of tensors, counted: what a process holds of them, whatever its allocators keep besides."""

import gc

import torch


def live_tensor_bytes() -> int:
    """Bytes of all tensors on the processor that are no collected garbage, storages that several share counted once."""
    found = (one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter))
    plain = [one for one in found if one.is_cpu and not one.is_mkldnn]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in plain}
    return sum(storage.nbytes() for storage in storages.values())
