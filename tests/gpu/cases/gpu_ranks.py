"""The case `ranks`: one peer on two cards, whose processes share every layer."""

import torch
from gpu.gpu_findings import CannotRun, Context, Findings
from support.models.tiny_models import greedy_references, make_tiny_model

from molink.peer.models.model import LocalModel
from molink.peer.ranks.backend import RankedBackend
from molink.shards.batching.engine import Rows
from molink.shards.batching.ways import DecodingWay
from molink.shards.checkpoint import store
from molink.shards.sampling.sample_request import SampleRequest
from molink.shards.sampling.sampling import Sampled
from molink.shards.spec import SamplingParams

RANKS = 2
PROMPTS = [[5, 6, 7], [9, 11], [200, 3, 4, 8]]
NEW_TOKENS = 24
DRAWN = SamplingParams(temperature=0.9, top_p=0.95)


def two_cards(context: Context, findings: Findings) -> None:
    """Recorded and launched, greedily and with seeds; on a processor two processes, which record nothing."""
    if not context.small and torch.cuda.device_count() < RANKS:
        raise CannotRun(f"it needs {RANKS} cards in one machine, and there is {torch.cuda.device_count()}")
    devices = tuple("cpu" if context.small else f"cuda:{index}" for index in range(RANKS))
    folder = make_tiny_model("llama", context.folder)
    manifest = store.read_manifest(folder)
    model = LocalModel(folder, manifest, store.describe(manifest, "float32"))
    expected = greedy_references(folder, PROMPTS, NEW_TOKENS)
    drawn = {}
    for way in (DecodingWay.RECORDED, DecodingWay.LAUNCHED):
        backend = RankedBackend(model, devices, way)
        with backend.ranks:
            backend.load(model.spec.whole, lambda _done, _total: None)()
            recorded = 0
            while backend.engine.record_next():
                recorded += 1
            before = _sums(backend)
            greedy = _generate(backend, SamplingParams())
            sums = [after - one for one, after in zip(before, _sums(backend), strict=True)]
            drawn[way] = _generate(backend, DRAWN)
        same = sum(one == its for one, its in zip(greedy, expected, strict=True))
        text = f"{same} of {len(PROMPTS)} are transformers'"
        findings.hold(f"{way.name.lower()}: generations", same == len(PROMPTS), text)
        steps = 1 if recorded else NEW_TOKENS
        text = f"{recorded} sizes recorded, {sums[0]} sums from Python"
        held = set(sums) == {2 * model.spec.layers * steps}
        records = way is DecodingWay.RECORDED and not context.small
        findings.hold(f"{way.name.lower()}: sums", held and bool(recorded) == records, text)
    same_draws = drawn[DecodingWay.RECORDED] == drawn[DecodingWay.LAUNCHED]
    findings.hold("drawn with seeds", same_draws, "the same tokens" if same_draws else "other tokens")


def _sums(backend: RankedBackend) -> list[int]:
    return [header["reductions"] for header, _ in backend.ranks.ask("count", {})]


def _generate(backend: RankedBackend, params: SamplingParams) -> list[list[int]]:
    """All prompts together."""
    engine = backend.engine
    whole = engine.spec.whole
    caches = [engine.new_cache(whole, len(prompt) + NEW_TOKENS) for prompt in PROMPTS]
    drawn: list[list[int]] = [[] for _ in PROMPTS]
    new = PROMPTS
    for _ in range(NEW_TOKENS):
        rows = [
            Rows(
                cache, len(ids), tuple(ids), logit_rows=1, requests=(SampleRequest(params, 7, cache.length),)
            )
            for cache, ids in zip(caches, new, strict=True)
        ]
        for told, one in zip(drawn, engine.step(whole, rows, None), strict=True):
            assert isinstance(one, Sampled)
            told.append(one.token_id)
        new = [told[-1:] for told in drawn]
    return drawn
