"""Whatever a model's layers keep of a session, and on however many devices: the loss of any hop changes no token."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.chaos.losses import lose_in_decode, lose_in_prompt
from support.models.tiny_models import LAYERS, VOCABULARY, make_tiny_model
from support.swarms.forked_peers import ForkedSwarm, fork_peer
from support.swarms.live_swarms import BUNDLED, References, bundled_folder, mostly_right

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

RANKED_PEER = Path(__file__).parents[2] / "support" / "devices" / "ranked_peer.py"
PROMPT_TOKENS = 90
NEW_TOKENS, GUESSED_TOKENS = 500, 900
SEEDS = 100
KINDS = {
    "keys and values": "llama",
    "windows": "mistral",
    "some windows": "gpt_oss",
    "states": "qwen3_next",
    "left-padded": "falcon_alibi",
}


class RankedSwarm(ForkedSwarm):
    """A swarm where those who hold the first layers have two devices each, and share them out between these."""

    async def launch(self, arguments: Sequence[str], log: Path) -> asyncio.subprocess.Process:
        if not log.name.startswith("0-"):
            return await super().launch(arguments, log)
        return await fork_peer(arguments, self.environment, log, RANKED_PEER)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Halves:
    """A model whose halves two peers hold each."""

    swarm: LocalSwarm
    model: str
    folder: Path
    layers: int

    async def open(self) -> None:
        """The first founds the swarm."""
        half = self.layers // 2
        first, *others = [f"{start}-{start + half}-{one}" for start in (0, half) for one in "ab"]
        await self._join(first)
        await asyncio.gather(*map(self._join, others))

    async def check(self, at: int, references: References) -> None:
        """Each loss costs no token, and who was lost comes back."""
        prompt, expected = self._long_one(references, NEW_TOKENS)
        for lose in (lose_in_decode, lose_in_prompt):
            async with AsyncSwarm(self.model, initial_peers=self.swarm.addresses) as client:
                generation, victim = await lose(client, self.swarm, at, prompt, NEW_TOKENS)
            await self._join(victim.name)
            assert generation.token_ids == expected
            assert victim.peer_id not in [hop.peer_id for hop in generation.circuit.hops]

    async def check_with_guesses(self, at: int, references: References) -> None:
        """Nor does a loss with guesses on their way, of which every second one is wrong."""
        prompt, expected = self._long_one(references, GUESSED_TOKENS)
        predicted = mostly_right(expected, wrong_every=2)
        async with AsyncSwarm(self.model, initial_peers=self.swarm.addresses) as client:
            generation, victim = await lose_in_decode(
                client, self.swarm, at, prompt, GUESSED_TOKENS, speculation="auto", prediction=predicted
            )
        await self._join(victim.name)
        assert generation.token_ids == expected
        assert 0 < generation.accepted_tokens < generation.guessed_tokens

    def _long_one(self, references: References, new_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A prompt, and the tokens that follow: the model does not stop before the last."""
        for seed in range(SEEDS):
            drawn = random.Random(seed)
            prompt = tuple(drawn.randrange(2, VOCABULARY) for _ in range(PROMPT_TOKENS))
            tokens = references.greedy(self.folder, prompt, new_tokens)
            if len(tokens) == new_tokens:
                return prompt, tokens
        raise AssertionError("this model stops early, whatever it is given")

    async def _join(self, name: str) -> None:
        span = ":".join(name.split("-")[:2])
        await self.swarm.join(name, "--model", self.model, "--layers", span)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("guesses", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_loss_of_a_hop_in_prompt_or_decode_changes_no_token(
    kind: str, guesses: bool, tmp_path: Path, references: References
) -> None:
    folder = make_tiny_model(KINDS[kind], tmp_path)
    async with ForkedSwarm() as swarm:
        halves = Halves(swarm, str(folder), folder, LAYERS)
        await halves.open()
        for at in (0, 1):
            await (halves.check_with_guesses if guesses else halves.check)(at, references)


@pytest.mark.timeout(600)
async def test_the_loss_of_a_hop_on_two_devices_changes_no_token(references: References) -> None:
    async with RankedSwarm() as swarm:
        halves = Halves(swarm, BUNDLED, bundled_folder(), 12)
        await halves.open()
        await halves.check(0, references)
