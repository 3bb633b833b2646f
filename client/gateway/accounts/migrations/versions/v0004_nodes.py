"""Nodes: machines that have registered, each by a token of its own.

Going back forgets them; their tokens stay, and register them again.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Makes the table."""
    op.create_table(
        "nodes",
        sa.Column("peer_id", sa.String(100), primary_key=True),
        sa.Column("key_id", sa.String(16), nullable=False),
        sa.Column("operator_id", sa.String(100), nullable=False),
        sa.Column("descriptor", sa.Text, nullable=False),
        sa.Column("registered_at_s", sa.Float(53), nullable=False),
    )
    op.create_index("nodes_by_key", "nodes", ["key_id"], unique=True)


def downgrade() -> None:
    """Drops it."""
    op.drop_index("nodes_by_key", "nodes")
    op.drop_table("nodes")
