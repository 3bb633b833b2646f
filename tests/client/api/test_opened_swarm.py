"""An opened swarm: why a chat cannot be turned into tokens."""

from pathlib import Path
from typing import cast

import pytest
from support.links.data_plane import SPEC
from support.models.tokenizer_kinds import unigram

from molink.client.api.held_circuits import HeldCircuits
from molink.client.api.opened_swarm import OpenedSwarm, SwarmOptions
from molink.client.api.overview import SwarmOverview
from molink.client.api.running_sessions import RunningSessions
from molink.client.circuit.circuit_builder import CircuitBuilder
from molink.client.circuit.connection import SwarmConnection
from molink.client.errors import InvalidRequest
from molink.client.models.model_resolver import ResolvedModel
from molink.client.text.text_work import TextWorkInThreads
from molink.shards.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("template", "code", "sentence"),
    [
        (None, "no_chat_template", "has no chat template"),
        (
            "{{ raise_exception('roles must alternate') }}",
            None,
            "refuses these messages: roles must alternate",
        ),
    ],
    ids=["none", "refusing"],
)
async def test_only_a_model_without_a_chat_template_is_refused_with_the_code_of_one(
    template: str | None, code: str | None, sentence: str, tmp_path: Path
) -> None:
    kind = unigram()
    kind.chat_template = template
    kind.save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    swarm = OpenedSwarm(
        SwarmOptions(None, None, None, None, None, "none", "off", str),
        cast("SwarmConnection", None),
        ResolvedModel(SPEC, {}, from_peers=False),
        cast("CircuitBuilder", None),
        TextWorkInThreads(tokenizer),
        tokenizer,
        RunningSessions(),
        cast("SwarmOverview", None),
        cast("HeldCircuits", None),
    )
    with pytest.raises(InvalidRequest, match=sentence) as refused:
        await swarm.encode_chat([{"role": "user", "content": "Good morrow!"}])
    assert (refused.value.parameter, refused.value.code) == ("messages", code)
