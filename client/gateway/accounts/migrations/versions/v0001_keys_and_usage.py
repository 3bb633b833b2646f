"""Keys, the number of their changes, and usage by day."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Makes the tables, and the one row that counts changes."""
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("digest", sa.LargeBinary(32), nullable=False),
        sa.Column("scopes", sa.String(100), nullable=False),
        sa.Column("quota_id", sa.String(16), nullable=False),
        sa.Column("requests_per_minute", sa.BigInteger),
        sa.Column("tokens_per_minute", sa.BigInteger),
        sa.Column("tokens_per_day", sa.BigInteger),
        sa.Column("streams", sa.BigInteger),
        sa.Column("models", sa.Text, nullable=False),
        sa.Column("created_at_s", sa.Float(53), nullable=False),
        sa.Column("expires_at_s", sa.Float(53)),
        sa.Column("revoked_at_s", sa.Float(53)),
        sa.Column("last_used_at_s", sa.Float(53)),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.create_index("api_keys_by_revision", "api_keys", ["revision"])
    changes = op.create_table(
        "key_changes",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.bulk_insert(changes, [{"id": 1, "revision": 0}])
    op.create_table(
        "usage_by_day",
        sa.Column("day", sa.String(10), primary_key=True),
        sa.Column("key_id", sa.String(16), primary_key=True),
        sa.Column("model", sa.String(300), primary_key=True),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    """Drops them."""
    op.drop_table("usage_by_day")
    op.drop_table("key_changes")
    op.drop_index("api_keys_by_revision", "api_keys")
    op.drop_table("api_keys")
