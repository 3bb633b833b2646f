"""Responses that are kept for a while. Going back forgets them."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Makes the table."""
    op.create_table(
        "kept_responses",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(16), nullable=False),
        sa.Column("kept", sa.Text, nullable=False),
        sa.Column("expires_at_s", sa.Float(53), nullable=False),
    )
    op.create_index("kept_responses_by_owner", "kept_responses", ["owner", "expires_at_s"])


def downgrade() -> None:
    """Drops it."""
    op.drop_table("kept_responses")
