"""Generations and explanations as a terminal shows them and as JSON values."""

import os
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from molink.client.api.generation import Explanation, Generation, Hop, HopTimes
from molink.commands import CommandFailed, plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from molink.routing.cost.terms import Term

PIPE_COLUMNS = 120
SHORT_ID = 8
"""The last characters of a peer id: the first ones are the same for all."""

_REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Unicode's bidirectional controls: with them a line shows otherwise than it reads (UAX 9, section 2)."""
_COLUMNS = ("compute", "compute", "queue", "link", "link", "together")
_SOURCES = ("predicted", "measured", "measured", "predicted", "measured", "measured")


def console() -> "Console":
    """For stdout; tables keep their width in a pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False)


def write_text(text: str) -> None:
    """Generated text to stdout, as it is; a terminal gets nothing that it would obey, since strangers' peers write it.

    Raises:
        CommandFailed: nobody reads it any more.
    """
    try:
        sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - it stays open to the end
        raise CommandFailed("whoever read the text has gone away, so the rest is not generated") from None


def end_line(text: str) -> None:
    """After a whole text: the line ends, unless the text has ended it."""
    if not text.endswith("\n"):
        write_text("\n")


def summary(generation: Generation) -> str:
    """One sentence about how it went."""
    hops = len(generation.circuit.hops)
    tokens = len(generation.token_ids)
    again = f", {generation.epochs - 1} of its circuits lost on the way" if generation.epochs > 1 else ""
    taken_over = sum(one.by_standby for one in generation.recoveries)
    again += f" ({taken_over} taken over by standbys)" if taken_over else ""
    trips = f" in {counted(generation.trips, 'trip')}" if generation.accepted_tokens else ""
    return (
        f"{counted(tokens, 'token')}{trips} over {counted(hops, 'hop')}{again}: "
        f"the first after {generation.ttft_s:.2f} s, then {generation.tpot_s * 1000:.1f} ms each"
    )


def circuit_of(generation: Generation) -> str:
    """The hops of the last circuit by name, with their layers: `attic 0:6 → cellar 6:12`."""
    return " → ".join(
        f"{plain(hop.name) or hop.peer_id[-SHORT_ID:]} {hop.start}:{hop.stop}"
        for hop in generation.circuit.hops
    )


def counted(number: int, what: str, several: str = "") -> str:
    """`1 peer`, `2 peers`; `several` where that is not made with an s."""
    return f"{number} {what}" if number == 1 else f"{number} {several or f'{what}s'}"


def generation_json(prompt: str, model: str, generation: Generation) -> dict[str, object]:
    """JSON-ready; times in seconds, predicted ones in milliseconds as their names say."""
    return {"model": model, "prompt": prompt, **asdict(generation)}


def explanation_json(prompt: str, model: str, explanation: Explanation) -> dict[str, object]:
    """JSON-ready, one flat object per hop."""
    hops = []
    for times in explanation.hops:
        row = asdict(times)
        hops.append({**row.pop("hop"), **row})
    return {
        "model": model,
        "prompt": prompt,
        "hops": hops,
        "predicted_tpot_ms": explanation.predicted_tpot_ms,
        "measured_tpot_ms": explanation.measured_tpot_ms,
        "predicted_ttft_ms": explanation.predicted_ttft_ms,
        "measured_ttft_ms": explanation.measured_ttft_ms,
        "objective_ms": explanation.objective_ms,
        "tokens_per_trip": explanation.generation.tokens_per_trip,
        "predicted_tokens_per_trip": explanation.predicted_tokens_per_trip,
        "predicted_trip_ms": explanation.predicted_trip_ms,
        "why_no_guesses": explanation.why_no_guesses,
        "guess_sources": [asdict(one) for one in explanation.guess_sources],
        "slowest": slowest(explanation),
        "generation": asdict(explanation.generation),
    }


def print_explanation(explanation: Explanation, out: "Console") -> None:
    """The circuit as a table, and in a sentence what is slowest."""
    if explanation.hops:
        out.print(_table(explanation))
        accounted_ms = sum(map(_together_ms, explanation.hops))
        trip_ms = explanation.measured_trip_ms
        out.print(
            f"A {_round_of(explanation)}: predicted {explanation.predicted_trip_ms:.2f} ms, "
            f"measured {trip_ms:.2f} ms, of which hops and links account for {accounted_ms:.2f} ms",
            markup=False,
        )
        out.print(
            f"The first token: predicted {explanation.predicted_ttft_ms:.2f} ms from a ready circuit, "
            f"measured {explanation.measured_ttft_ms:.2f} ms",
            markup=False,
        )
        if any(times.terms for times in explanation.hops):
            out.print(
                "\nWhy this circuit: milliseconds per token; in brackets what counts in its choice only"
            )
            out.print(_terms_table(explanation))
            _print_said("Measured", [times.measured for times in explanation.hops], out)
            _print_said("Assumed", [times.assumed for times in explanation.hops], out)
    generation = explanation.generation
    if generation.guessed_tokens:
        out.print(
            f"A trip brought {generation.tokens_per_trip:.2f} tokens, so a token took "
            f"{explanation.measured_tpot_ms:.2f} ms: {generation.accepted_tokens} of "
            f"{counted(generation.guessed_tokens, 'guess', 'guesses')} were right. Predicted: "
            f"{explanation.predicted_tokens_per_trip:.2f} tokens, {explanation.predicted_tpot_ms:.2f} ms",
            markup=False,
        )
        if explanation.guess_sources:
            sources = ", ".join(
                f"{one.source} {one.accepted_tokens} of {one.guessed_tokens}"
                for one in explanation.guess_sources
            )
            out.print(f"Guesses that were right, by source: {sources}", markup=False)
    elif explanation.why_no_guesses:
        out.print(f"Nothing was guessed: {plain(explanation.why_no_guesses)}", markup=False)
    kept = [hop for hop in explanation.generation.circuit.hops if hop.standby]
    if kept:
        said = ", ".join(map(_copy_of, kept))
        out.print(f"Copies of KV caches: {said}", markup=False)
    out.print(slowest(explanation), markup=False)


def _copy_of(hop: Hop) -> str:
    behind = f", {counted(hop.copy_behind_tokens, 'token')} behind" if hop.copy_behind_tokens else ""
    form = hop.copy_form.replace("_", " ")
    return f"of [{hop.start}, {hop.stop}) on {hop.standby[-8:]} ({form}{behind})"


def slowest(explanation: Explanation) -> str:
    """Says in one sentence where most of a token's time goes."""
    if not explanation.hops:
        return "Nothing was measured: that takes at least two tokens on one circuit"
    shares = [
        (milliseconds, f"{what} {plain(_name(times))} (layers {times.hop.start}:{times.hop.stop})")
        for times in explanation.hops
        for milliseconds, what in (
            (times.measured_compute_ms, "computing on"),
            (times.measured_queue_ms, "waiting in the queue of"),
            (times.measured_link_ms, "the link out of"),
        )
    ]
    milliseconds, what = max(shares)
    whole_ms = max(explanation.measured_trip_ms, milliseconds)
    of = f"of a {_round_of(explanation)}'s time"
    share = f", {100 * milliseconds / whole_ms:.0f} % {of}" if whole_ms > 0 else ""
    return f"Slowest: {what} takes {milliseconds:.2f} ms{share}"


def _round_of(explanation: Explanation) -> str:
    """What goes round the circuit: one token, or with guesses some."""
    return "trip" if explanation.generation.guessed_tokens else "token"


def _table(explanation: Explanation) -> "Table":
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    title = f"One {_round_of(explanation)}'s way along the circuit, in milliseconds (medians)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)  # 80 columns hold it
    table.add_column("hop", no_wrap=True)
    table.add_column("peer", overflow="fold")
    table.add_column("layers", justify="right", no_wrap=True)
    for what, how in zip(_COLUMNS, _SOURCES, strict=True):
        table.add_column(f"{what}\n{how}", justify="right", no_wrap=True)
    hops = explanation.hops
    for number, times in enumerate(hops, start=1):
        name = escape(plain(_name(times)))
        layers = f"{times.hop.start}:{times.hop.stop}"
        table.add_row(str(number), name, layers, *_cells((times,)), end_section=number == len(hops))
    table.add_row("", "all hops", f"{hops[0].hop.start}:{hops[-1].hop.stop}", *_cells(hops))
    return table


def _terms_table(explanation: Explanation) -> "Table":
    """Table of what each hop was charged; what no token waits for is in brackets."""
    from rich.markup import escape
    from rich.table import Table

    from molink.routing.cost.terms import TERM_NAMES

    hops = explanation.hops
    table = Table()
    table.add_column("term", no_wrap=True)
    for number, times in enumerate(hops, start=1):
        table.add_column(f"{number}\n{escape(plain(_name(times)))}", justify="right", overflow="fold")
    table.add_column("all\nhops", justify="right", no_wrap=True)
    names = sorted({term.name for times in hops for term in times.terms}, key=TERM_NAMES.index)
    charged = [{term.name: term for term in times.terms} for times in hops]
    for name in names:
        cells = [_charge(one.get(name)) for one in charged]
        whole_ms = sum(one[name].ms for one in charged if name in one)
        table.add_row(name, *cells, f"{whole_ms:.2f}", end_section=name == names[-1])
    sums = [sum(term.ms for term in times.terms) for times in hops]
    table.add_row("together", *(f"{ms:.2f}" for ms in sums), f"{explanation.objective_ms:.2f}")
    return table


def _charge(term: "Term | None") -> str:
    if term is None:
        return ""
    return f"{term.ms:.2f}" if term.in_tpot else f"({term.ms:.2f})"


def _print_said(what: str, hops: Sequence[tuple[str, ...]], out: "Console") -> None:
    """Prints what is known or assumed, and of which hops."""
    said: dict[str, list[str]] = {}
    for number, sentences in enumerate(hops, start=1):
        for sentence in sentences:
            said.setdefault(sentence, []).append(str(number))
    for sentence, numbers in said.items():
        hops_said = f"hop{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
        out.print(f"{what} of {hops_said}: {sentence}", markup=False)


def _cells(hops: tuple[HopTimes, ...]) -> list[str]:
    columns = (
        sum(times.predicted_compute_ms for times in hops),
        sum(times.measured_compute_ms for times in hops),
        sum(times.measured_queue_ms for times in hops),
        sum(times.predicted_link_ms for times in hops),
        sum(times.measured_link_ms for times in hops),
        sum(map(_together_ms, hops)),
    )
    return [f"{milliseconds:.2f}" for milliseconds in columns]


def _together_ms(times: HopTimes) -> float:
    return times.measured_compute_ms + times.measured_queue_ms + times.measured_link_ms


def _name(times: HopTimes) -> str:
    return times.hop.name or times.hop.peer_id[-SHORT_ID:]


def harmless(text: str) -> str:
    """Without control characters, and without those that reorder or hide what stands around them."""
    return "".join(
        "\ufffd"
        if character in _REORDERING
        or (unicodedata.category(character) in ("Cc", "Zl", "Zp") and character not in "\n\t")
        else character
        for character in text
    )
