"""Levels of quotas, and leases of streams. What they hold is of minutes, or of one day: going back loses that alone."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Makes the tables."""
    op.create_table(
        "quota_levels",
        sa.Column("quota_id", sa.String(16), primary_key=True),
        sa.Column("requests_left", sa.Float(53)),
        sa.Column("requests_at_s", sa.Float(53)),
        sa.Column("tokens_left", sa.Float(53)),
        sa.Column("tokens_at_s", sa.Float(53)),
        sa.Column("day_tokens_left", sa.Float(53)),
        sa.Column("day_tokens_at_s", sa.Float(53)),
    )
    op.create_table(
        "stream_leases",
        sa.Column("quota_id", sa.String(16), primary_key=True),
        sa.Column("gateway_id", sa.String(32), primary_key=True),
        sa.Column("held", sa.Integer, nullable=False),
        sa.Column("expires_at_s", sa.Float(53), nullable=False),
    )


def downgrade() -> None:
    """Drops them."""
    op.drop_table("stream_leases")
    op.drop_table("quota_levels")
