"""Heads that guess from a model's last hidden state: how they are trained, and how they guess as a draft does.

One decoder layer reads each token's embedding and the model's last hidden state before it, and says the next one, of
which the model's own head makes logits (EAGLE, Li et al. 2024, arXiv 2401.15077). `hidden_state_draft.py` measures
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from molink.peer.speculation.draft_drawing import DraftDrawing
from molink.peer.speculation.draft_model import DraftCache, DraftLookup, DraftModel, DraftShape, Floats

HIDDEN, MLP, VOCABULARY, POSITIONS = 192, 480, 1024, 1024
BLOCK, BATCH, PASSES = 256, 16, 3
SPOKEN: Final = ((0.8, 624), (0.0, 192))
"""Blocks of training text by temperature: as many as trained the bundled draft model."""
BEGINNING = 8
"""Tokens of a block that are drawn at temperature 1, so that greedy ones differ."""
UNKNOWN_ROWS = 64
"""In half of the training blocks the hidden states of at most so many first tokens are missing, as a prompt's are."""


class HiddenStateHead(nn.Module):
    """One decoder layer between the model's own embedding and head, which stay as they are."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        own = {"num_hidden_layers": 1, "intermediate_size": MLP, "tie_word_embeddings": False}
        config = LlamaConfig.from_dict(model.config.to_dict() | own)
        self.layers = LlamaForCausalLM(config)
        frozen = {name: one for name, one in model.state_dict().items() if ".layers." not in name}
        self.layers.load_state_dict(frozen, strict=False)
        for name, one in self.layers.named_parameters():
            one.requires_grad_(name not in frozen)
        self.fuse = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, tokens: Tensor, before: Tensor) -> Tensor:
        """The hidden states that these tokens will have, normed, from those of the tokens before them."""
        fused = self.fuse(torch.cat([self.layers.model.embed_tokens(tokens), before], -1))
        states: Tensor = self.layers.model(inputs_embeds=fused, use_cache=False).last_hidden_state
        return states

    def trained(self) -> list[nn.Parameter]:
        return [one for one in self.parameters() if one.requires_grad]

    def as_draft(self) -> "Head":
        """In NumPy."""
        tensors = {name: one.detach().numpy() for name, one in self.layers.state_dict().items()}
        of_token, of_state = self.fuse.weight.detach().numpy().T.reshape(2, HIDDEN, HIDDEN)
        embedding, vocabulary = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
        tensors["lm_head.weight"] = np.eye(HIDDEN, dtype=np.float32)
        c = self.layers.config
        heads = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        shape = DraftShape(*heads, c.rms_norm_eps, c.rope_parameters["rope_theta"], POSITIONS)
        layer = DraftModel.of(shape, 1, tensors)
        return Head(layer, embedding @ of_token, np.ascontiguousarray(of_state), vocabulary.T)


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A `HiddenStateHead` in NumPy."""

    layer: DraftModel
    """Which says the next hidden state in place of logits."""
    of_token: Floats
    """What each token brings to the layer, [vocabulary, hidden]."""
    of_state: Floats
    """What the hidden state before brings, [hidden, hidden]."""
    vocabulary: Floats
    """The model's own head, [hidden, vocabulary]."""


@torch.inference_mode()
def said_text(model: LlamaForCausalLM, seed: int) -> Tensor:
    """What the model says after a random token: [blocks, BLOCK]."""
    torch.manual_seed(seed)
    blocks = []
    for temperature, count in SPOKEN:
        ids = torch.randint(VOCABULARY, (count, 1))
        for tokens, at, top_p in ((BEGINNING, 1.0, 1.0), (BLOCK, temperature, 0.9)):
            drawn = (
                {"do_sample": True, "temperature": at, "top_p": top_p, "top_k": 0}
                if at
                else {"do_sample": False}
            )
            more = tokens - ids.shape[1]
            ids = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=more, min_new_tokens=more, **drawn
            )
        blocks.append(ids)
    return torch.cat(blocks)


@torch.inference_mode()
def hidden_states(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """The last ones, normed, as the model's head takes them: [blocks, tokens, HIDDEN]."""
    parts = [
        model.model(input_ids=part, use_cache=False).last_hidden_state for part in torch.split(tokens, 8)
    ]
    return torch.cat(parts)


def train(head: HiddenStateHead, text: Tensor, states: Tensor, steps: int, seed: int) -> None:
    """Each step computes its blocks several times, from the second time on with the head's own hidden states in place
    of half of the model's: so it meets in training what it makes of its own guesses."""
    generator = torch.Generator().manual_seed(seed)
    optimizers = [
        torch.optim.Muon([one for one in head.trained() if one.ndim == 2], lr=0.02, weight_decay=0.02),
        torch.optim.AdamW([one for one in head.trained() if one.ndim == 1], lr=0.005, weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: min(1.0, (step + 1) / 30, (steps - step) / steps))
        for one in optimizers
    ]
    for step in range(1, steps + 1):
        chosen = torch.randperm(len(text), generator=generator)[:BATCH]
        tokens, wanted = text[chosen], states[chosen].float()
        likely = head.layers.lm_head(wanted).softmax(-1)
        before = nn.functional.pad(wanted[:, :-1], (0, 0, 1, 0))
        unknown = torch.randint(UNKNOWN_ROWS, (BATCH, 1), generator=generator)
        unknown[BATCH // 2 :] = 0
        before = before * (torch.arange(BLOCK) >= unknown)[..., None]
        fed, loss = before, torch.zeros(())
        for _ in range(PASSES):
            said = head(tokens, fed)
            told = -(likely * head.layers.lm_head(said).log_softmax(-1)).sum(-1).mean()
            loss = loss + (told + nn.functional.smooth_l1_loss(said, wanted)) / PASSES
            own = torch.rand(BATCH, BLOCK, 1, generator=generator) < 0.5
            fed = torch.where(own, nn.functional.pad(said[:, :-1], (0, 0, 1, 0)), before)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(head.trained(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}/{steps}: loss {loss:.3f}, of the last pass {told:.3f}", flush=True)


class HeadCache(DraftCache):
    """A draft model's cache whose tokens come with the hidden states before them."""

    def __init__(self, head: Head) -> None:
        super().__init__(head.layer)
        self._head = head
        self.before: Floats = np.zeros((POSITIONS, HIDDEN), np.float32)
        """Of each position; its own where the model's are not known, and 0 where it has none either."""

    def step(self, token_ids: Sequence[int]) -> Floats:
        """As `DraftCache.step`; the next position has the hidden state that is said here."""
        head, begin, end = self._head, len(self.tokens), len(self.tokens) + len(token_ids)
        entered = head.of_token[list(token_ids)] + self.before[begin:end] @ head.of_state
        self._model = replace(head.layer, embedding=entered)
        self.before[end] = super().step(range(len(token_ids)))
        self.tokens[begin:] = token_ids
        logits: Floats = self.before[end] @ head.vocabulary
        return logits


class HeadLookup(DraftLookup):
    """Owns what a head has seen of one sequence: the hidden states of all its tokens but the last, or of the last that
    was computed for each trip alone, and its own in between."""

    def __init__(
        self, head: Head, drawing: DraftDrawing | None, states: Floats, guess_ms: float, *, all_rows: bool
    ) -> None:
        super().__init__(replace(head.layer, guess_ms=guess_ms), drawing)
        self._cache: HeadCache = HeadCache(head)
        self._states, self._all_rows = states, all_rows

    def extend(self, tokens: Sequence[int]) -> None:
        """The tail returns rows with these tokens."""
        before, held = self._length, self._cache.tokens
        super().extend(tokens)
        if self._all_rows:
            self._cache.truncate(before)
            first = max(before, 1)
            self._cache.before[first : self._length] = self._states[first - 1 : self._length - 1]
            return
        pairs = zip(held[before:], tokens, strict=False)
        same = before + next((at for at, pair in enumerate(pairs) if pair[0] != pair[1]), len(held[before:]))
        self._cache.before[same : self._length] = 0
        self._cache.before[self._length - 1] = self._states[self._length - 2]
