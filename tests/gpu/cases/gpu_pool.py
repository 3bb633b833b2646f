"""The case `full-pool`: more sessions than there is room for, for minutes, under the cap that a peer gets."""

import random
import time
from dataclasses import dataclass, field

import torch
from bench.engine.engine_gpu import TINY, Bench, Scale, llama
from gpu.cases.big_models import spec_for_scale
from gpu.cases.gpu_recording import decoding_of
from gpu.gpu_findings import Context, Findings

from molink.peer.device.device import cap_gpu_memory
from molink.peer.memory.memory import format_bytes, gpu_reserve_bytes, plan_memory
from molink.peer.scheduling.microbatch import batch_limits
from molink.shards.batching.engine import Engine, Rows
from molink.shards.kv.extents import PoolFull
from molink.shards.kv.kv_cache import SequenceCache

SESSIONS = 64
SMALL_SESSIONS = 6
LASTING_S = 60.0
SMALL_LASTING_S = 2.0
CAP_BYTES = 7 << 29
"""Weights of 2.2 GB, what a peer keeps free, and a pool of 1.0 of the 1.3 GB that the sessions want at most."""
SMALL_KV_TOKENS = 160
_PROMPT_TOKENS = (1, 40, 300, 1500)
_NEW_TOKENS = (8, 64, 256)
_MODEL = Scale(llama(16, 2048, 8192, 32, 32_000), "bfloat16", SESSIONS, 0, 1500, 512, 0, 0)


@dataclass(slots=True)
class _Session:
    cache: SequenceCache
    prompt: int
    """Tokens of it that are left."""
    new: int
    """Tokens that are left to generate."""
    token: int = 1


@dataclass(slots=True)
class _Load:
    """Sessions that come and go."""

    engine: Engine
    sessions: int
    most_tokens: int
    draw: random.Random = field(default_factory=lambda: random.Random(7))
    open: list[_Session] = field(default_factory=list)
    ended: int = 0
    waited: int = 0
    """Steps that the pool had no room for, and that a smaller one took the place of."""
    steps: int = 0
    unsound: int = 0

    def step(self) -> None:
        """Some of the sessions, prompts and decode mixed."""
        span = self.engine.held[0]
        while len(self.open) < self.sessions:
            prompt = min(self.draw.choice(_PROMPT_TOKENS), self.most_tokens // 2)
            new = min(self.draw.choice(_NEW_TOKENS), self.most_tokens // 2)
            cache = self.engine.new_cache(span, prompt + new, reserve=False)
            self.open.append(_Session(cache, prompt, new))
        self.draw.shuffle(self.open)
        self._step_some(self.open[: self.draw.choice((1, 8, self.sessions))])
        for one in [one for one in self.open if one.new == 0]:
            one.cache.close()
            self.open.remove(one)
            self.ended += 1
        self.steps += 1

    def _step_some(self, some: list[_Session]) -> None:
        """As a peer does: halves where the pool has no room for all."""
        span, room = self.engine.held[0], 512
        rows, taking = [], []
        for one in some:
            count = min(one.prompt, room) if one.prompt else 1
            if count < 1:
                continue
            room -= count
            ids = (1,) * count if one.prompt else (one.token,)
            rows.append(Rows(one.cache, count, ids, logit_rows=int(count >= one.prompt)))
            taking.append(one)
        try:
            logits = self.engine.step(span, rows, None)
        except PoolFull:
            if len(some) == 1:
                raise
            self.waited += 1
            self._step_some(some[: len(some) // 2])
            return
        self.unsound += int((~logits.isfinite()).any())
        tokens = iter(logits.argmax(-1).tolist())
        for one, row in zip(taking, rows, strict=True):
            one.prompt -= min(one.prompt, row.count)
            if row.logit_rows:
                one.token = next(tokens)
                one.new -= 1


def full_pool(context: Context, findings: Findings) -> None:
    """Any out-of-memory ends the case: nothing here catches it."""
    scale = TINY if context.small else _MODEL
    spec = spec_for_scale(scale)
    bench = Bench(scale, context.device, decoding_of(context.device, records=True))
    weights = bench.stage.weight_bytes
    if context.small:
        cap_bytes, kv_bytes = 0, spec.kv_bytes(spec.whole, SMALL_KV_TOKENS)
    else:
        there = torch.cuda.get_device_properties(context.device).total_memory
        cap_bytes = min(CAP_BYTES, there * 9 // 10)
        torch.cuda.empty_cache()
        cap_gpu_memory(context.device, cap_bytes)
        reserve_bytes = gpu_reserve_bytes(spec, cap_bytes)
        plan = plan_memory(spec, cap_bytes, batch_limits(spec).max_tokens, reserve_bytes=reserve_bytes)
        kv_bytes = plan.total_bytes - plan.workspace_bytes - weights
    engine = bench.engine(decoding=bench.decoding)
    findings.hold("the pool", engine.limit_kv(kv_bytes), f"{format_bytes(kv_bytes)} for keys and values")
    most_tokens = 64 if context.small else 2000
    load = _Load(engine, SMALL_SESSIONS if context.small else SESSIONS, most_tokens)
    deadline_s = time.monotonic() + (SMALL_LASTING_S if context.small else LASTING_S)
    fullest = 0
    while time.monotonic() < deadline_s:
        load.step()
        fullest = max(fullest, engine.pool.used_bytes)
    engine.pool.check_integrity()
    text = f"{load.steps} steps, {load.ended} sessions ended, {load.waited} steps were halved"
    findings.hold("out of memory", load.ended > 0, f"never; {text}", steps=load.steps, ended=load.ended)
    findings.hold("the pool was full", fullest >= 0.8 * kv_bytes, f"{fullest / kv_bytes:.0%} at most")
    findings.hold("logits that are no numbers", load.unsound == 0, f"{load.unsound} steps")
    if not context.small:
        reserved = torch.cuda.max_memory_reserved(context.device)
        findings.bound("the card's memory over the cap", reserved / cap_bytes, "", 1.0)
