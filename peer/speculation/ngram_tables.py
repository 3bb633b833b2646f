"""Guesses from n-grams: what came most often after the last one to four tokens in a client's earlier generations. Pure.

A client's tables are never used for another's guesses: whether they are accepted would tell one what the other's text
says (decision 0007). Nor are those of one scope for another's, by which a client tells its own users apart.
"""

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable

LONGEST_CONTEXT = 4
"""Tokens, as in lookahead decoding's pools and in what was measured for the bundled model."""
SLOTS = 1 << 16
"""Of one client: 9 bytes each. n-grams share them by hash; one that comes more often drives out one that does not."""
MOST_TABLES = 32
"""Of all clients and scopes together."""
MOST_COUNT = 255
STRENGTHS_OF_CONTEXT = 3
"""Counted once, two or three times, or more often."""


class NgramTable:
    """Owns what came after the n-grams of one client's generations, in a memory of fixed size."""

    def __init__(self, slots: int = SLOTS) -> None:
        """`slots` is a power of two."""
        self._mask = slots - 1
        self._checks = array("I", bytes(4 * slots))
        """By slot: of the n-gram that has it, further bits of the hash."""
        self._tokens = array("i", bytes(4 * slots))
        self._counts = array("B", bytes(slots))
        """How much more often the token came than others did; 0: the slot is free."""

    def forget(self) -> None:
        """It takes no memory any more, whoever refers to it: it says nothing from now on, and learns nothing."""
        self._checks, self._tokens, self._counts = array("I"), array("i"), array("B")

    def learn(self, context: tuple[int, ...], token: int) -> None:
        """The token came after these, of which the last one to LONGEST_CONTEXT count."""
        counts = self._counts
        if not counts:
            return
        for begin in range(max(0, len(context) - LONGEST_CONTEXT), len(context)):
            slot, check = self._slot_of(context[begin:])
            if not counts[slot]:
                self._checks[slot], self._tokens[slot], counts[slot] = check, token, 1
            elif self._checks[slot] != check or self._tokens[slot] != token:
                counts[slot] -= 1
            elif counts[slot] < MOST_COUNT:
                counts[slot] += 1

    def find(self, context: tuple[int, ...]) -> tuple[int, int] | None:
        """The token that came most often after the longest end of the context that is known, and how strong a guess
        it is."""
        if not self._counts:
            return None
        for begin in range(max(0, len(context) - LONGEST_CONTEXT), len(context)):
            slot, check = self._slot_of(context[begin:])
            if (count := self._counts[slot]) and self._checks[slot] == check:
                often = min(count.bit_length(), STRENGTHS_OF_CONTEXT) - 1
                return self._tokens[slot], (len(context) - begin) * STRENGTHS_OF_CONTEXT + often
        return None

    def _slot_of(self, context: tuple[int, ...]) -> tuple[int, int]:
        hashed = hash(context)
        return hashed & self._mask, (hashed >> 28) & 0xFFFF_FFFF


class ClientTables:
    """Owns the tables of the clients whose sessions were the latest, one for each client and scope: at most
    MOST_TABLES, those of sessions that are under way included."""

    def __init__(self) -> None:
        self._tables: OrderedDict[tuple[str, bytes], NgramTable] = OrderedDict()

    def of_client(self, peer_id: str, scope: bytes = b"") -> NgramTable:
        """The table of this client's sessions of that scope. The client that has most makes room by the one whose
        sessions were longest ago; of several, the client that was away longest."""
        if (table := self._tables.get((peer_id, scope))) is not None:
            self._tables.move_to_end((peer_id, scope))
            return table
        if len(self._tables) == MOST_TABLES:
            self._make_room(peer_id)
        table = self._tables[peer_id, scope] = NgramTable()
        return table

    def _make_room(self, peer_id: str) -> None:
        """For one more table of this client, which counts as his already."""
        held = Counter([owner for owner, _ in self._tables])
        held[peer_id] += 1
        most = max(held.values())
        self._tables.pop(next(one for one in self._tables if held[one[0]] == most)).forget()


class TableLookup:
    """Holds the last tokens of a sequence, and learns into its client's table what is generated."""

    def __init__(self, table: NgramTable) -> None:
        self._table = table
        self._last: deque[int] = deque(maxlen=LONGEST_CONTEXT)

    def begin_with(self, tokens: Iterable[int]) -> None:
        """The sequence begins with these, which are not learnt."""
        self._last.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """What is generated has these tokens more."""
        for token in tokens:
            self._table.learn(tuple(self._last), token)
            self._last.append(token)

    def begin(self) -> "TableChain":
        """Guesses of what comes behind the sequence."""
        return TableChain(self._table, tuple(self._last))


class TableChain:
    """A row of guesses from a table, one after the other."""

    def __init__(self, table: NgramTable, context: tuple[int, ...]) -> None:
        self._table = table
        self._context = context

    def guess(self) -> tuple[int, int] | None:
        """The next token, and how strong a guess it is; None: the table says nothing."""
        return self._table.find(self._context)

    def follow(self, token: int) -> None:
        """The sequence goes on with this token, whoever guessed it."""
        self._context = (*self._context[1 - LONGEST_CONTEXT :], token)
