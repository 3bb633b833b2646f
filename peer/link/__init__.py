"""Links between peers, and between clients and peers, over gRPC.

On Linux gRPC polls its sockets in the thread that waits for its events, not in threads of its own: there every read
wakes three threads, which costs a receiver of bulk a quarter more processor time (docs/BENCHMARKS.md, "The link"). gRPC
for Python polled so until it took up its event engine, and offers the way back in the environment, which it reads when
it is imported: so this is said here, before any module of this package imports it. What the environment says already
stands. gRPC ignores names that it does not know, with a line on standard error.
"""

import os
import sys

if sys.platform == "linux":
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
