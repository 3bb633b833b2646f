"""Links between peers, and between clients and peers, over gRPC.

On Linux the accepting end's sockets are read by the thread that waits for gRPC's events, not by threads of gRPC's own:
there every read wakes three threads, which costs a receiver of bulk a quarter more processor time
(docs/benchmarks/link.md, "The link: decode beside a prefill"). gRPC for Python polled so until it took up its event
engine, and offers the way back in the environment, which it reads when it is imported: so this is said here, before
any module of this package imports it. What the environment says already stands. gRPC ignores names that it does not
know, with a line on standard error.

The dialling end keeps the event engine: without it links whose connections were cut again and again, through a proxy,
were lost (tests/e2e/changes/test_broken_connections.py).

Nothing of gRPC's own log reaches standard error: it names addresses, and what fails is told by ours. It too is set by
the environment alone, and read at the same moment.
"""

import os
import sys

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
if sys.platform == "linux":
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
