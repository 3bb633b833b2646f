"""Circuits of services in the database: how many each gateway has. Together they have no more than the maximum."""

from dataclasses import asdict, dataclass
from typing import Final

from sqlalchemy import delete, select

from molink.client.gateway.accounts.database import Database
from molink.client.gateway.accounts.schema import CIRCUIT_LEASES, SERVICES
from molink.client.gateway.services.service import CircuitDemand, circuit_shares, granted_circuits

CIRCUITS_LAPSE_AFTER_S: Final = 10.0
"""A gateway that does not say for so long that it has circuits is taken to have none; its peers' leases have ended by
then as well."""


@dataclass(frozen=True, slots=True)
class CircuitGrant:
    """Answer of the database: how many circuits a gateway may have, and what the others need."""

    circuits: int
    in_use_elsewhere: int = 0
    waiting_elsewhere: int = 0


class CircuitStore:
    """Circuits of all services, as one gateway leases them."""

    def __init__(self, database: Database, gateway_id: str) -> None:
        self._database = database
        self._gateway_id = gateway_id

    async def exchange(self, service: str, maximum: int, demand: CircuitDemand) -> CircuitGrant:
        """Says what this gateway has and wants of a service's circuits, and returns what it may have.

        Raises:
            AccountsUnavailable: as `Database.transaction` does.
        """
        table = CIRCUIT_LEASES.c
        async with self._database.transaction() as connection:
            wanted = select(self._database.now_s()).select_from(SERVICES).where(SERVICES.c.name == service)
            now_s = (await connection.execute(wanted.with_for_update(of=SERVICES))).scalar_one_or_none()
            if now_s is None:
                return CircuitGrant(0)  # the service is gone
            lapsed = (table.service == service) & (table.expires_at_s <= float(now_s))
            await connection.execute(delete(CIRCUIT_LEASES).where(lapsed))
            others = select(
                table.gateway_id, table.held, table.in_use, table.waiting, table.idle, table.spare
            ).where(table.service == service, table.gateway_id != self._gateway_id)
            rows = (await connection.execute(others)).all()
            demands = {row[0]: CircuitDemand(*row[2:]) for row in rows} | {self._gateway_id: demand}
            ordered = sorted(demands)
            shares = circuit_shares(maximum, [demands[one] for one in ordered])
            share = shares[ordered.index(self._gateway_id)]
            granted = granted_circuits(maximum, share, sum(row[1] for row in rows))
            held = max(granted, demand.occupied)
            own = {"service": service, "gateway_id": self._gateway_id}
            if demand.is_nothing:
                is_own = (table.service == service) & (table.gateway_id == self._gateway_id)
                await connection.execute(delete(CIRCUIT_LEASES).where(is_own))
            else:
                values = asdict(demand) | {
                    "held": held,
                    "expires_at_s": float(now_s) + CIRCUITS_LAPSE_AFTER_S,
                }
                await connection.execute(
                    self._database.insert(CIRCUIT_LEASES)
                    .values(**own, **values)
                    .on_conflict_do_update(index_elements=["service", "gateway_id"], set_=values)
                )
        return CircuitGrant(granted, sum(row[2] for row in rows), sum(row[3] for row in rows))
