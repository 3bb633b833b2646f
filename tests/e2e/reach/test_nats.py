"""Two homes behind NATs reach each other over a relay at once, and move to a hole where their NATs allow one.

Real processes in network namespaces, as root on Linux with `ip` and `nft`; elsewhere these tests are skipped and say
what is missing. The namespaces have no delay, so what depends on timing (routers that answer strangers with a reset) is
not here.
"""

import pytest
from support.links.homes import dialled
from support.links.namespaces import require_namespaces
from support.pairwise import usually

pytestmark = pytest.mark.real

PUNCHED = (
    ("port", "carrier"),
    ("symmetric", "restricted"),
    ("restricted", "full"),
    ("port", "port"),
    ("moved", "moved"),
    ("carrier", "moved"),
    ("carrier", "carrier"),
    ("symmetric", "full"),
)
RELAYED = (("symmetric", "symmetric"), ("symmetric", "port"), ("blocked", "port"), ("blocked", "blocked"))


@pytest.fixture(autouse=True)
def namespaces() -> None:
    require_namespaces()


@pytest.mark.parametrize(("kind", "other_kind"), usually(PUNCHED[:1], PUNCHED[1:]))
def test_a_link_is_relayed_at_once_and_moves_to_a_hole_without_losing_anything(
    kind: str, other_kind: str
) -> None:
    said = dialled(kind, other_kind, wait_s=20.0)
    assert (said["first_way"], said["way"]) == ("relayed", "punched")
    assert said["in_order"]
    assert said["closed"] is None


@pytest.mark.full
@pytest.mark.parametrize(("kind", "other_kind"), usually(RELAYED[:1], RELAYED[1:]))
def test_where_there_can_be_no_hole_the_relayed_way_stays(kind: str, other_kind: str) -> None:
    said = dialled(kind, other_kind, wait_s=1.0)
    assert (said["first_way"], said["way"]) == ("relayed", "relayed")
    assert said["in_order"]
    assert said["closed"] is None


@pytest.mark.full
def test_a_relayed_home_whose_router_forgets_its_connections_is_found_again_and_nothing_is_lost() -> None:
    said = dialled("symmetric", "port", forgets=True, stays=1, wait_s=0.5)
    assert (said["first_way"], said["way"]) == ("relayed", "relayed")
    assert said["in_order"]
    assert said["closed"] is None


@pytest.mark.full
def test_a_hole_that_closes_without_a_word_is_left_for_the_relay_and_nothing_is_lost() -> None:
    said = dialled("port", "port", parts=True, wait_s=20.0)
    assert said["moved_ms"] is not None
    assert (said["first_way"], said["way"]) == ("relayed", "relayed")
    assert said["in_order"]
    assert said["closed"] is None
