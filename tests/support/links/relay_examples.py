"""One example of each packet of a relay, and how docs/PROTOCOL.md describes it."""

from molink.peer.wire.reach.packets import (
    Challenge,
    DialBack,
    DialledBack,
    Invite,
    Invited,
    Joined,
    JoinRequest,
    Packet,
    ReachRequest,
    RelayPing,
    RelayPong,
    RelayProof,
    RelayRefusal,
    RelayWelcome,
    Stay,
)

TOKEN = b"0123456789abcdef"
EXAMPLES: tuple[tuple[Packet, str], ...] = (
    (Challenge(b"n" * 32), 'CHALLENGE nonce="n"*32'),
    (
        RelayProof(b"k" * 32, b"m" * 32, b"s" * 64, b""),
        'PROOF public_key="k"*32 nonce="m"*32 signature="s"*64 swarm_proof=none',
    ),
    (
        RelayWelcome(b"s" * 64, "203.0.113.10:4000", b"p" * 32),
        'WELCOME signature="s"*64 observed="203.0.113.10:4000" swarm_proof="p"*32',
    ),
    (Stay(), "STAY"),
    (
        ReachRequest(b"k" * 32, TOKEN, direct=False),
        'REACH public_key="k"*32 token="0123456789abcdef" direct=0',
    ),
    (Invite(b"k" * 32, TOKEN, direct=True), 'INVITE public_key="k"*32 token="0123456789abcdef" direct=1'),
    (Invited(), "INVITED"),
    (JoinRequest(TOKEN), 'JOIN token="0123456789abcdef"'),
    (Joined("2001:db8::1"), 'JOINED host="2001:db8::1"'),
    (RelayRefusal("nobody waits for this"), 'REFUSED reason="nobody waits for this"'),
    (DialBack(4001, b"h" * 32), 'DIAL_BACK port=4001 certificate_hash="h"*32'),
    (DialledBack(found=True), "DIALLED_BACK found=1"),
    (RelayPing(), "PING"),
    (RelayPong(), "PONG"),
)
