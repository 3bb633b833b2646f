"""How many circuits of a service each gateway has. Going back forgets them; gateways then count for themselves."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Makes the table."""
    op.create_table(
        "circuit_leases",
        sa.Column("service", sa.String(63), primary_key=True),
        sa.Column("gateway_id", sa.String(100), primary_key=True),
        sa.Column("held", sa.Integer, nullable=False),
        sa.Column("in_use", sa.Integer, nullable=False),
        sa.Column("waiting", sa.Integer, nullable=False),
        sa.Column("idle", sa.Integer, nullable=False),
        sa.Column("spare", sa.Integer, nullable=False),
        sa.Column("expires_at_s", sa.Float(53), nullable=False),
    )


def downgrade() -> None:
    """Drops it."""
    op.drop_table("circuit_leases")
