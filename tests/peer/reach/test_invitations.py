"""Which invitations a peer follows: no relay, asker or address has more than its part, and rooms are given back."""

from hypothesis import given
from hypothesis import strategies as st

from molink.peer.reach.invitations import (
    INVITATIONS,
    LEFT_ALONE_S,
    MOST_FOLLOWED,
    MOST_OF_A_RELAY,
    Invitation,
    InvitationLimiter,
)

HERE = Invitation("relay", "192.0.2.1:443")


def follow(limiter: InvitationLimiter, invitation: Invitation, asker: str, now_s: float) -> str | None:
    return limiter.admit(invitation.relay, asker, now_s) or limiter.follow(invitation, now_s)


def proven() -> InvitationLimiter:
    limiter = InvitationLimiter()
    limiter.record_proof(HERE.address)
    return limiter


def test_a_relay_has_part_of_what_is_followed_at_once_and_room_that_is_given_back() -> None:
    limiter = proven()
    refusals = [follow(limiter, HERE, f"asker {number}", 0.0) for number in range(MOST_OF_A_RELAY + 1)]
    assert refusals[:-1] == [None] * MOST_OF_A_RELAY
    assert refusals[-1] is not None
    other = Invitation("another relay", "192.0.2.1:443")
    assert follow(limiter, other, "asker", 0.0) is None
    limiter.end(HERE)
    assert follow(limiter, HERE, "asker again", 0.0) is None


def test_what_a_relay_passes_on_without_end_leaves_the_others_theirs() -> None:
    limiter = proven()
    followed = 0
    for number in range(1000):
        if follow(limiter, HERE, f"asker {number}", 0.0) is None:
            followed += 1
            limiter.end(HERE)
    assert followed == INVITATIONS.network.at_once
    assert follow(limiter, Invitation("another relay", HERE.address), "asker", 0.0) is None


def test_an_address_where_no_relay_has_proven_itself_is_dialled_once_whoever_names_it() -> None:
    limiter = InvitationLimiter()
    now_s = 0.0
    followed = []
    while now_s < 3 * LEFT_ALONE_S:
        invitation = Invitation(f"relay {now_s}", "192.0.2.9:443")
        if follow(limiter, invitation, f"asker {now_s}", now_s) is None:
            followed.append(now_s)
            limiter.end(invitation)
        now_s += 1.0
    assert followed == [0.0, LEFT_ALONE_S, 2 * LEFT_ALONE_S]
    limiter.record_proof("192.0.2.9:443")
    assert follow(limiter, Invitation("relay", "192.0.2.9:443"), "asker", now_s) is None


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(0, 40), st.integers(0, 5), st.floats(0.0, 5.0), st.booleans()
        ),
        max_size=300,
    )
)
def test_whatever_comes_no_more_than_so_many_are_followed_of_each_and_of_all(
    asked: list[tuple[int, int, int, float, bool]],
) -> None:
    limiter, now_s = InvitationLimiter(), 0.0
    followed: list[Invitation] = []
    for relay, asker, address, after_s, ends in asked:
        now_s += after_s
        if ends and followed:
            limiter.end(followed.pop(0))
        invitation = Invitation(f"relay {relay}", f"192.0.2.{address}:443")
        if follow(limiter, invitation, f"asker {asker}", now_s) is None:
            followed.append(invitation)
        assert len(followed) <= MOST_FOLLOWED
        assert sum(one.relay == invitation.relay for one in followed) <= MOST_OF_A_RELAY
