"""Whatever is guessed, a circuit's tokens are those that it gives without guesses, and its caches hold no others."""

from dataclasses import replace

import pytest
from support.links.data_plane import asynchronous
from support.models.tiny_models import greedy_references
from support.swarms.guesses import Chance, GuessingHead, LastWrong, NeverRight, Oracle
from support.swarms.served_circuit import served_circuit
from support.swarms.served_peer import model

from molink.peer.models.model import LocalModel
from molink.peer.serving.data_plane import DataPlaneSettings

__all__ = ["model"]

NEW_TOKENS = 40
SETTINGS = DataPlaneSettings(copies=True)
PROMPTS = [[(7 * at + 3 * one + 1) % 60 for at in range(9 + 4 * one)] for one in range(4)]


def guessing(head: GuessingHead) -> DataPlaneSettings:
    return replace(SETTINGS, guesses=head)


@pytest.mark.parametrize("kind", [Oracle, LastWrong, NeverRight, Chance])
@pytest.mark.parametrize("cuts", [(), (3,), (2, 4)])
@asynchronous
async def test_greedy_tokens_are_those_of_transformers(
    model: LocalModel, kind: type[Oracle], cuts: tuple[int, ...]
) -> None:
    expected = greedy_references(model.folder, PROMPTS, NEW_TOKENS)
    head = GuessingHead(kind, [[*prompt, *new] for prompt, new in zip(PROMPTS, expected, strict=True)])
    async with served_circuit(model, cuts, kv_tokens=400, settings=guessing(head)) as circuit:
        circuit.speculates = True
        assert await circuit.generate(PROMPTS, NEW_TOKENS) == expected
        for peer in circuit.peers:
            peer.engine.pool.check_integrity()
            assert peer.engine.pool.tables == 0
    assert (head.accepted > 0) == (kind is not NeverRight)
    assert (head.accepted < head.guessed) == (kind is not Oracle)
