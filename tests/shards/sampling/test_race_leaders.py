"""What a draft on a device guesses is what a small one guesses, and what the tail would draw from the same logits."""

import numpy as np
import pytest
import torch

from molink.peer.speculation.draft_drawing import STRENGTHS, DraftDrawing, first_ranked
from molink.shards.sampling.race_leaders import race_leaders
from molink.shards.sampling.sample_request import SampleRequest
from molink.shards.sampling.sampling import sample
from molink.shards.spec import SamplingParams

VOCABULARY = 3000
KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=7),
    SamplingParams(temperature=1.0, top_k=40, top_p=0.7),
    SamplingParams(temperature=0.9, min_p=0.05),
    SamplingParams(temperature=1e-12),
]


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_they_are_those_of_the_tail_and_as_sure_as_in_a_small_draft(rows: int) -> None:
    logits = 4 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows))
    requests = [SampleRequest(KINDS[row % len(KINDS)], 11, 100 + row) for row in range(rows)]
    found = race_leaders(logits, requests)
    assert [token for token, _ in found] == [one.token_id for one in sample(logits, requests)]
    for (token, sure), request, row in zip(found, requests, logits.numpy(), strict=True):
        drawing = DraftDrawing.of(request.params, request.seed)
        [expected] = first_ranked(drawing, row.astype(np.float32), request.position, 1)
        assert (token, min(STRENGTHS - 1, int(STRENGTHS * sure))) == expected


def test_rows_do_not_depend_on_their_neighbours() -> None:
    logits = torch.randn(len(KINDS), VOCABULARY, generator=torch.Generator().manual_seed(3))
    requests = [SampleRequest(one, 5, 9) for one in KINDS]
    alone = [race_leaders(logits[row : row + 1], requests[row : row + 1])[0] for row in range(len(KINDS))]
    for found, expected in zip(race_leaders(logits, requests), alone, strict=True):
        assert found == (expected[0], pytest.approx(expected[1]))
