"""Expositions of metrics, held against what Prometheus' documentation asks of names and units."""

import re

from prometheus_client.parser import text_string_to_metric_families

_OWN = re.compile(r"(molink|process|python)(_[a-z0-9]+)+")
_OTHER_UNITS = (
    "_ms",
    "_us",
    "_ns",
    "_minutes",
    "_hours",
    "_mb",
    "_kb",
    "_gb",
    "_mbps",
    "_percent",
    "_percentage",
)
_LABEL = re.compile(r"[a-z][a-z_]*")


def faults_of(text: str) -> list[str]:
    """What of an exposition is not as the conventions have it: names with this program's prefix, base units, `_total`
    at the end of counters alone, a sentence for each family, labels in small letters."""
    faults = []
    for family in text_string_to_metric_families(text):
        name = family.name
        if not _OWN.fullmatch(name):
            faults.append(f"{name}: not a name of this program")
        if name.endswith(_OTHER_UNITS):
            faults.append(f"{name}: seconds and bytes are the units")
        if not family.documentation:
            faults.append(f"{name}: nothing says what it is")
        if family.type in ("unknown", "untyped"):
            faults.append(f"{name}: has no type")
        if family.type == "gauge" and name.endswith("_total"):
            faults.append(f"{name}: a gauge is no total")
        for sample in family.samples:
            if family.type == "counter" and not sample.name.endswith(("_total", "_created")):
                faults.append(f"{sample.name}: a counter ends in _total")
            labels = set(sample.labels)
            if any(not _LABEL.fullmatch(label) for label in labels) or (
                labels & {"le"} and family.type != "histogram"
            ):
                faults.append(f"{sample.name}: labels {sorted(labels)}")
    return faults
