"""What a process of `forked_peers` has loaded before it forks peers: their modules, lean as `molink-peer` loads them.

A test's own process has transformers as it is, which answers are compared with; the peers have what peers have. What
most of them load on their way as well is here already: models of the bundled one's kind, and what lays them out when a
kind is first met.
"""

import importlib

from molink.dht.host.lean_libp2p import load_lean_libp2p
from molink.shards.loading.lean_transformers import bring_in_meta_kernels, load_lean_transformers

load_lean_libp2p()
load_lean_transformers()
bring_in_meta_kernels()

for name in (
    "support.swarms.forked_peers",
    "torch.fx.experimental.symbolic_shapes",
    "transformers.models.llama.modeling_llama",
    "molink.peer.commands.cli",
    "molink.peer.daemon.peer",
):
    importlib.import_module(name)
