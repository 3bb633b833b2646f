"""The process that follows grammars: `python -m molink.peer.masks`, started by `mask_worker.py`.

It answers one order after the other, in their order. A grammar that breaks the library, or takes all the memory that
this process may have, ends it, and nothing else; it ends with stdin too.
"""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from molink.peer.ranks.messages import read_message, write_message
from molink.shards.grammar import Grammar
from molink.shards.text.token_masks import GrammarFailed, MaskTokenizer, TokenMasks
from molink.shards.text.tokenizer import Tokenizer

FREE_S = 2.0
"""Of a processor that each grammar may take in all, and so much more for each token."""
FREE_S_PER_TOKEN = 0.05
MEMORY_BYTES = 2 * 2**30
"""That this process may address, where the system can limit it."""


@dataclass(slots=True, eq=False)
class FollowedGrammar:
    """One session's grammar, and what it has taken so far."""

    masks: TokenMasks
    tokens: int = 0
    spent_s: float = 0.0

    def check(self) -> None:
        """Raises GrammarFailed: it takes more time than a session has for it."""
        if self.spent_s > FREE_S + FREE_S_PER_TOKEN * self.tokens:
            raise GrammarFailed(f"the grammar has taken {self.spent_s:.1f} s, more than a session may")


class GrammarFollower:
    """Owner of the grammars that are followed, by the numbers that the peer gives them."""

    def __init__(self, tokenizer: MaskTokenizer) -> None:
        self._tokenizer = tokenizer
        self._followed: dict[int, FollowedGrammar] = {}

    def answer(self, order: Mapping[str, Any]) -> tuple[dict[str, object], bytes]:
        """What comes of an order: the mask of what may come behind its tokens, and of what may come behind those that
        are expected then, or why there is none."""
        for number in order["drop"]:
            self._followed.pop(number, None)
        began_s = time.process_time()
        try:
            followed = self._find(order)
            followed.masks.follow(order["tokens"])
            masks = [followed.masks.next()]
            expected = followed.masks.expected(order["most"])
            masks += [(mask, ends) for _, mask, ends in expected]
            followed.tokens += len(order["tokens"])
            followed.spent_s += time.process_time() - began_s
            followed.check()
        except GrammarFailed as error:
            self._followed.pop(order["number"], None)
            return {"error": str(error)}, b""
        header = {"ends": [ends for _, ends in masks], "expected": [token for token, _, _ in expected]}
        return header, b"".join(mask for mask, _ in masks)

    def _find(self, order: Mapping[str, Any]) -> FollowedGrammar:
        """The grammar that is followed, or one more."""
        number = order["number"]
        if order["grammar"] is not None:
            kind, text = order["grammar"]
            self._followed[number] = FollowedGrammar(TokenMasks(self._tokenizer, Grammar(kind, text)))
        return self._followed[number]


def limit_memory() -> None:
    """Has the system refuse more than MEMORY_BYTES; Windows, and macOS in effect, cannot."""
    if sys.platform == "win32":
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_AS)
    least = MEMORY_BYTES if most == resource.RLIM_INFINITY else min(most, MEMORY_BYTES)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (least, most))
    except (ValueError, OSError):
        return


def main() -> None:
    """Answers until stdin ends. The first message says whose tokens they are."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    orders = sys.stdin.buffer
    opening = read_message(orders)
    if opening is None:
        return
    asked, _ = opening
    limit_memory()
    try:
        tokenizer = Tokenizer.from_folder(Path(asked["folder"]))
        follower = GrammarFollower(MaskTokenizer(tokenizer, asked["vocabulary"], asked["stop_ids"]))
    except (ValueError, OSError, ImportError, MemoryError) as error:
        write_message(answers, {"error": f"this model serves no grammars: {error}"})
        return
    write_message(answers, {"ready": True})
    while (message := read_message(orders)) is not None:
        header, mask = follower.answer(message[0])
        write_message(answers, header, mask)
