"""Ranks of a test as threads of one process: what each rank holds and sums, without processes."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from molink.shards.batching.engine import Engine, Rows
from molink.shards.checkpoint.manifest import Manifest
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.model.stage import Stage
from molink.shards.model.tensor_parallel import Shard
from molink.shards.spec import ModelSpec

WAIT_S = 60.0


class RankThreads:
    """All ranks of one model in this process."""

    def __init__(self, folder: Path, manifest: Manifest, spec: ModelSpec, ranks: int) -> None:
        self.spec = spec
        self.reduced_bytes = 0
        self._ranks = ranks
        self._stepping = False
        self._partial: list[Tensor | None] = [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=WAIT_S)
        self.stages: list[Stage] = [
            load_stage(
                folder,
                spec.whole,
                StageSettings(
                    spec.dtype,
                    spec.quantization,
                    shard=Shard(rank, ranks, self._all_reduce(rank)),
                    exact=True,
                ),
                manifest=manifest,
            )
            for rank in range(ranks)
        ]
        self.engines = [Engine(spec, "cpu") for _ in range(ranks)]
        for engine, stage in zip(self.engines, self.stages, strict=True):
            engine.attach(stage)
        self.caches = [engine.new_cache(spec.whole, 128) for engine in self.engines]

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Logits after these further tokens, put together."""
        parts: list[Tensor | None] = [None] * self._ranks

        def run(rank: int) -> None:
            rows = [Rows(self.caches[rank], len(tokens), tuple(tokens), logit_rows=1)]
            parts[rank] = self.engines[rank].step(self.spec.whole, rows, None)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self._ranks)]
        self._stepping = True
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        self._stepping = False
        return torch.cat([part for part in parts if part is not None], 1)

    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        drawn = [int(self.step(prompt)[0].argmax())]
        while len(drawn) < tokens:
            drawn.append(int(self.step(drawn[-1:])[0].argmax()))
        return drawn

    def _all_reduce(self, rank: int) -> Callable[[Tensor], Tensor]:
        def all_reduce(partial: Tensor) -> Tensor:
            if not self._stepping:
                return partial
            self._partial[rank] = partial
            self._barrier.wait()
            total = torch.stack([one for one in self._partial if one is not None]).sum(0)
            self._barrier.wait()
            if rank == 0:
                self.reduced_bytes += partial.nbytes
            return total

        return all_reduce
