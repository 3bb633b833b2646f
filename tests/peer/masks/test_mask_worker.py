"""Whatever a stranger's grammar does to the process that follows it, it fails alone, and the others go on."""

import asyncio
import os
import random
import signal

import pytest
from support.links.data_plane import DEADLINE_S, asynchronous, until
from support.swarms.live_swarms import bundled_folder

from molink.peer.masks.mask_worker import GrammarState, MaskedModel, MaskOrder, MaskWorker, NextMask
from molink.shards.grammar import KINDS, Grammar, GrammarError
from molink.shards.text.token_masks import GrammarFailed

MODEL = MaskedModel(bundled_folder(), 1024, (0, 1))
MOST = 15
SCHEMA = Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
HOSTILE = {  # without limits these take minutes, or all memory
    "unclosed": Grammar.regex("(("),
    "look-around": Grammar.regex("(?=a)b"),
    "many states": Grammar.regex("(a|b)*a(a|b){30000}"),
    "nested repetitions": Grammar.regex("((((a{0,900}){0,900}){0,900}){0,900}){0,900}b"),
    "deep groups": Grammar.regex("(" * 20_000 + "a" + ")" * 20_000),
    "ambiguous": Grammar.lark("start: s\ns: s s s s | s s | /a*/ | /a+/ | /(a|aa)+/ |"),
    "deep rules": Grammar.lark("start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "long literal": Grammar.lark('start: "' + "a" * 65_000 + '"'),
    "no rule": Grammar.lark("start: nothing"),
    "imports": Grammar.lark("%import common.INT\nstart: INT"),
    "many rules": Grammar.lark(
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(3000)) + '\nr3000: "a"'
    ),
    "many patterns": Grammar.json_schema(
        {
            "type": "object",
            "properties": {f"p{i}": {"pattern": "^[a-z]{1,50}[0-9]{0,30}$"} for i in range(1000)},
        }
    ),
    "intersections": Grammar.json_schema(
        {"type": "string", "allOf": [{"pattern": f"^(a|b)*a(a|b){{{n}}}$"} for n in range(10, 30)]}
    ),
    "a schema of itself": Grammar.json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "a schema elsewhere": Grammar.json_schema({"$ref": "http://192.0.2.1/schema.json"}),
    "a file": Grammar.json_schema({"$ref": "file:///etc/passwd"}),
    "large bounds": Grammar.json_schema({"type": "array", "minItems": 10**9}),
    "long strings": Grammar.json_schema({"type": "string", "minLength": 10**9}),
    "unknown keyword": Grammar.json_schema({"type": "array", "uniqueItems": True}),
}


async def next_mask(
    worker: MaskWorker, state: GrammarState, tokens: tuple[int, ...] = (), position: int = 0
) -> NextMask | Exception:
    """What may come behind these tokens, all that were generated, and behind those that are expected then."""
    answer: asyncio.Future[NextMask | Exception] = asyncio.get_running_loop().create_future()
    worker.begin(MaskOrder(state, position, lambda followed: tokens[followed:], answer.set_result, MOST))
    return await answer


def first_allowed(found: NextMask) -> int:
    """Of the tokens that may come the first one that ends nothing."""
    return next(token for token in range(2, 1024) if found.allowed[token // 8] >> token % 8 & 1)


async def several(worker: MaskWorker, state: GrammarState, count: int) -> list[bytes]:
    """The masks behind so many tokens, one after the other."""
    tokens: tuple[int, ...] = ()
    masks = []
    for position in range(count):
        found = await next_mask(worker, state, tokens, position)
        assert isinstance(found, NextMask), found
        assert found.position == position
        masks.append(found.allowed)
        tokens += (first_allowed(found),)
    return masks


@pytest.mark.full
@asynchronous
async def test_hostile_grammars_fail_alone_and_others_have_the_masks_that_they_have_without_them() -> None:
    async with MaskWorker(MODEL, DEADLINE_S) as worker:
        expected = await several(worker, GrammarState(SCHEMA), 6)
        for name, grammar in HOSTILE.items():
            hostile = asyncio.create_task(next_mask(worker, GrammarState(grammar)))
            beside = await several(worker, GrammarState(SCHEMA), 6)
            assert beside == expected, name
            found = await hostile
            assert isinstance(found, NextMask) or str(found), name


@asynchronous
async def test_with_a_mask_come_those_behind_the_tokens_that_are_expected() -> None:
    async with MaskWorker(MODEL, DEADLINE_S) as worker:
        state = GrammarState(Grammar.regex("to be or not to be"))
        found = await next_mask(worker, state)
        assert isinstance(found, NextMask)
        assert 2 < len(found.expected) == len(found.behind) <= MOST
        come = found.expected[:2]
        assert found.along((*come, 0)) == (found, *found.behind[:2])
        assert found.along(()) == found.along((0, *come)) == (found,)
        later = await next_mask(worker, state, come, 2)
        assert isinstance(later, NextMask)
        assert (later.allowed, later.ends) == (found.behind[1].allowed, found.behind[1].ends)


@asynchronous
async def test_a_grammar_goes_on_where_it_was_after_another_has_ended_the_process() -> None:
    async with MaskWorker(MODEL, DEADLINE_S) as worker:
        state, tokens = GrammarState(SCHEMA), (95,)
        before = await next_mask(worker, state)
        assert isinstance(before, NextMask)
        tokens = (first_allowed(before),)
        expected = await next_mask(worker, state, tokens, 1)
        pid = worker.pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        await until(lambda: worker.pid != pid)
        assert await next_mask(worker, state, tokens, 1) == expected
        assert worker.pid not in (None, pid)


@asynchronous
async def test_a_grammar_that_ends_the_process_is_the_one_that_fails() -> None:
    async with MaskWorker(MODEL, DEADLINE_S) as worker:
        assert isinstance(await next_mask(worker, GrammarState(SCHEMA)), NextMask)
        pid = worker.pid
        broken = await next_mask(worker, GrammarState(HOSTILE["many rules"]))
        assert isinstance(broken, GrammarFailed)
        assert "the grammar is more than can be followed" in str(broken)
        assert isinstance(await next_mask(worker, GrammarState(SCHEMA)), NextMask)
        assert worker.pid != pid


@asynchronous
async def test_one_that_never_answers_is_ended_and_only_its_order_fails() -> None:
    async with MaskWorker(MODEL, DEADLINE_S) as worker:
        assert isinstance(await next_mask(worker, GrammarState(SCHEMA)), NextMask)
        worker.answer_within_s = 0.5
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        first = asyncio.create_task(next_mask(worker, GrammarState(SCHEMA)))
        await asyncio.sleep(0)  # it is ordered now
        worker.answer_within_s = DEADLINE_S
        second = await next_mask(worker, GrammarState(SCHEMA))
        failed = await first
        assert isinstance(failed, GrammarFailed)
        assert "took longer" in str(failed)
        assert isinstance(second, NextMask)


@pytest.mark.parametrize(
    "model", [MaskedModel(bundled_folder() / "nowhere", 1024, (0,)), MaskedModel(bundled_folder(), 1024, ())]
)
@asynchronous
async def test_a_model_that_serves_no_grammars_says_so(model: MaskedModel) -> None:
    async with MaskWorker(model) as worker:
        for _ in range(2):
            failed = await next_mask(worker, GrammarState(SCHEMA))
            assert isinstance(failed, GrammarFailed)
            assert "this model serves no grammars" in str(failed)


@asynchronous
async def test_any_text_is_a_grammar_or_an_error() -> None:
    rng = random.Random(7)
    letters = '(){}[]|*+?^$ab:\n\\"/, \u00e9'
    async with MaskWorker(MODEL, DEADLINE_S) as worker:
        for _ in range(200):
            text = "".join(rng.choices(letters, k=rng.randint(0, 60)))
            try:
                grammar = Grammar(rng.choice(KINDS), rng.choice(["", "start: "]) + text)
            except GrammarError:
                continue
            found = await next_mask(worker, GrammarState(grammar))
            assert isinstance(found, NextMask | GrammarFailed)
