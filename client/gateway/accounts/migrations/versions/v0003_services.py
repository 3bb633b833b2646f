"""Services, and operations that take long. Going back forgets the services; their keys stay, and open nothing."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Makes the tables."""
    op.create_table(
        "services",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("specification", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("operation_id", sa.String(16), nullable=False),
        sa.Column("created_at_s", sa.Float(53), nullable=False),
        sa.Column("running_since_s", sa.Float(53)),
        sa.Column("requests_before", sa.BigInteger, nullable=False),
        sa.Column("tokens_before", sa.BigInteger, nullable=False),
        sa.Column("owner_id", sa.String(100), nullable=False),
        sa.Column("owned_until_s", sa.Float(53), nullable=False),
        sa.Column("observed", sa.Text, nullable=False),
    )
    op.create_table(
        "operations",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("subject", sa.String(100), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("message", sa.String(500), nullable=False),
        sa.Column("progress", sa.Float(53), nullable=False),
        sa.Column("cancels", sa.Integer, nullable=False),
        sa.Column("created_at_s", sa.Float(53), nullable=False),
        sa.Column("updated_at_s", sa.Float(53), nullable=False),
    )


def downgrade() -> None:
    """Drops them."""
    op.drop_table("operations")
    op.drop_table("services")
