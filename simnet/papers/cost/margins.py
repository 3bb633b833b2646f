"""What serving costs and brings in: section 5.2 of the MoLink system paper. Pure.

Money is in one currency of the caller's choice throughout a calculation.
"""

from dataclasses import dataclass

HOURS_PER_YEAR = 365 * 24


@dataclass(frozen=True, slots=True)
class Owned:
    """Machines that were bought and run at home: cost = price / years + power."""

    devices: int
    device_price: float
    years: float
    """That a device is used."""
    power_w: float
    """Of one device."""
    power_price_per_kwh: float

    def __post_init__(self) -> None:
        if self.devices < 1 or not self.years > 0 or not min(self.device_price, self.power_w) >= 0:
            raise ValueError(f"owned machines need a device, years above 0 and no negative price: {self}")

    @property
    def cost_per_hour(self) -> float:
        bought = self.device_price / (self.years * HOURS_PER_YEAR)
        return self.devices * (bought + self.power_w / 1000 * self.power_price_per_kwh)


@dataclass(frozen=True, slots=True)
class Rented:
    """Machines of a cloud: cost = their rent."""

    devices: int
    rent_per_hour: float
    """Of one device."""

    def __post_init__(self) -> None:
        if self.devices < 1 or not self.rent_per_hour >= 0:
            raise ValueError(f"rented machines need a device and no negative rent: {self}")

    @property
    def cost_per_hour(self) -> float:
        return self.devices * self.rent_per_hour


def income_per_hour(throughput_tps: float, price_per_million_tokens: float) -> float:
    """Of output tokens, which alone are paid (the paper's `profit`)."""
    return throughput_tps * 3600 / 1e6 * price_per_million_tokens


def margin(income: float, cost: float) -> float:
    """(income - cost) / cost, of the same time. Raises ValueError if nothing is spent."""
    if not cost > 0:
        raise ValueError(f"a margin is of costs above 0, not of {cost:g}")
    return (income - cost) / cost


def implied_cost_per_hour(
    throughput_tps: float, price_per_million_tokens: float, printed_margin: float
) -> float:
    """The cost from which a printed margin follows. Raises ValueError for a margin of -1 or less."""
    if not printed_margin > -1:
        raise ValueError(f"no cost gives a margin of {printed_margin:g}")
    return income_per_hour(throughput_tps, price_per_million_tokens) / (1 + printed_margin)
