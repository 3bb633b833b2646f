"""What the short words above columns and beside axes stand for."""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

PRINTED = "printed"
"""Above a value that a paper prints: `paper` is the name of a policy."""
WORDS: Mapping[str, str] = MappingProxyType(
    {
        "TTFT": "time to first token, from a request's arrival on",
        "TPOT": "time per output token, from one to the next, the first left out",
        "TBT": "time between tokens, from one to the next, the first left out",
        "JCT": "job completion time, from a request's arrival to its last token",
        "latency": "from a request's arrival to its last token",
        "TP": "tensor parallelism, ranks that share each layer",
        "PP": "pipeline parallelism, stages that share the layers",
        PRINTED: "what the paper prints of the same setting",
        "policy paper": "MoLink as the transmission paper describes it; molink is ours",
    }
)


def explained(texts: Iterable[str]) -> list[str]:
    """A line for each of `WORDS` that is in one of the texts."""
    said = "\n".join(texts)
    return [f"{word}: {what}" for word, what in WORDS.items() if re.search(rf"\b{word}\b", said)]
