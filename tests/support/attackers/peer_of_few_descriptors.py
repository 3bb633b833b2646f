"""`python tests/support/attackers/peer_of_few_descriptors.py ARGUMENTS`: `molink-peer ARGUMENTS` that may have few
files and sockets."""

import resource

from molink.dht.host.lean_libp2p import load_lean_libp2p
from molink.shards.loading.lean_transformers import load_lean_transformers

if __name__ == "__main__":  # as `molink-peer` does
    load_lean_libp2p()
    load_lean_transformers()

from molink.peer.commands import cli

DESCRIPTORS = 1024

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    cli.main()
