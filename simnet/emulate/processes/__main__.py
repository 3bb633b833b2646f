"""`python -m molink.simnet.emulate.processes peer|lines CONFIGURATION`: a process of an emulation.

A peer imports libp2p and transformers without what it never uses, as `molink-peer` does.
"""

import sys


def main(kind: str) -> None:
    if kind == "lines":
        from molink.simnet.emulate.processes import lines

        lines.main()
        return
    from molink.dht.host.lean_libp2p import load_lean_libp2p
    from molink.shards.loading.lean_transformers import load_lean_transformers

    load_lean_libp2p()
    load_lean_transformers()
    from molink.simnet.emulate.processes import peer

    peer.main()


main(sys.argv.pop(1))
