"""Tables of the gateway's database. What changes here needs a revision in `migrations/versions/`.

Times are seconds since 1970 (UTC), so that SQLite and PostgreSQL keep the same.
"""

from typing import Final

from sqlalchemy import BigInteger, Column, Float, Index, Integer, LargeBinary, MetaData, String, Table, Text

NAME_LENGTH: Final = 200
MODEL_LENGTH: Final = 300
SERVICE_NAME_LENGTH: Final = 63
SUBJECT_LENGTH: Final = 100
MESSAGE_LENGTH: Final = 500
_ID: Final = String(16)

METADATA: Final = MetaData()

API_KEYS: Final = Table(
    "api_keys",
    METADATA,
    Column("id", _ID, primary_key=True),
    Column("name", String(NAME_LENGTH), nullable=False),
    Column("digest", LargeBinary(32), nullable=False),
    Column("scopes", String(100), nullable=False),
    Column("quota_id", _ID, nullable=False),
    Column("requests_per_minute", BigInteger),
    Column("tokens_per_minute", BigInteger),
    Column("tokens_per_day", BigInteger),
    Column("streams", BigInteger),
    Column("models", Text, nullable=False),
    Column("created_at_s", Float(53), nullable=False),
    Column("expires_at_s", Float(53)),
    Column("revoked_at_s", Float(53)),
    Column("last_used_at_s", Float(53)),
    Column("revision", BigInteger, nullable=False),
    Index("api_keys_by_revision", "revision"),
)
"""`scopes` and `models` are JSON lists."""

KEY_CHANGES: Final = Table(
    "key_changes",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("revision", BigInteger, nullable=False),
)
"""One row: the number of changes to keys. Who changes one locks it, so that numbers are seen in their order."""

USAGE_BY_DAY: Final = Table(
    "usage_by_day",
    METADATA,
    Column("day", String(10), primary_key=True),
    Column("key_id", _ID, primary_key=True),
    Column("model", String(MODEL_LENGTH), primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
)
"""`day` is 2026-11-25; `key_id` is empty for requests without a key."""

QUOTA_LEVELS: Final = Table(
    "quota_levels",
    METADATA,
    Column("quota_id", _ID, primary_key=True),
    Column("requests_left", Float(53)),
    Column("requests_at_s", Float(53)),
    Column("tokens_left", Float(53)),
    Column("tokens_at_s", Float(53)),
    Column("day_tokens_left", Float(53)),
    Column("day_tokens_at_s", Float(53)),
)
"""Null: a full bucket."""

STREAM_LEASES: Final = Table(
    "stream_leases",
    METADATA,
    Column("quota_id", _ID, primary_key=True),
    Column("gateway_id", String(32), primary_key=True),
    Column("held", Integer, nullable=False),
    Column("expires_at_s", Float(53), nullable=False),
)
"""How many generations of a key each gateway may have under way; what is not renewed lapses."""

SERVICES: Final = Table(
    "services",
    METADATA,
    Column("name", String(SERVICE_NAME_LENGTH), primary_key=True),
    Column("specification", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("operation_id", _ID, nullable=False),
    Column("created_at_s", Float(53), nullable=False),
    Column("running_since_s", Float(53)),
    Column("requests_before", BigInteger, nullable=False),
    Column("tokens_before", BigInteger, nullable=False),
    Column("owner_id", String(100), nullable=False),
    Column("owned_until_s", Float(53), nullable=False),
    Column("observed", Text, nullable=False),
)
"""`specification` and `observed` are JSON. `requests_before` and `tokens_before`: what was used under that name before
the service was there. `owner_id` is empty where no gateway holds its circuits; what is not renewed lapses."""

CIRCUIT_LEASES: Final = Table(
    "circuit_leases",
    METADATA,
    Column("service", String(SERVICE_NAME_LENGTH), primary_key=True),
    Column("gateway_id", String(SUBJECT_LENGTH), primary_key=True),
    Column("held", Integer, nullable=False),
    Column("in_use", Integer, nullable=False),
    Column("waiting", Integer, nullable=False),
    Column("idle", Integer, nullable=False),
    Column("spare", Integer, nullable=False),
    Column("expires_at_s", Float(53), nullable=False),
)
"""What each gateway has and wants of a service's circuits, as `CircuitDemand`; `held` counts against the service's
maximum. What is not renewed lapses."""

OPERATIONS: Final = Table(
    "operations",
    METADATA,
    Column("id", _ID, primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("subject", String(SUBJECT_LENGTH), nullable=False),
    Column("state", String(16), nullable=False),
    Column("message", String(MESSAGE_LENGTH), nullable=False),
    Column("progress", Float(53), nullable=False),
    Column("cancels", Integer, nullable=False),
    Column("created_at_s", Float(53), nullable=False),
    Column("updated_at_s", Float(53), nullable=False),
)
"""`cancels` is 1 where somebody wants it undone."""

NODES: Final = Table(
    "nodes",
    METADATA,
    Column("peer_id", String(SUBJECT_LENGTH), primary_key=True),
    Column("key_id", _ID, nullable=False),
    Column("operator_id", String(SUBJECT_LENGTH), nullable=False),
    Column("descriptor", Text, nullable=False),
    Column("registered_at_s", Float(53), nullable=False),
    Index("nodes_by_key", "key_id", unique=True),
)
"""`descriptor` is JSON; `key_id` is the token by which it registered."""

KEPT_RESPONSES: Final = Table(
    "kept_responses",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("owner", _ID, nullable=False),
    Column("kept", Text, nullable=False),
    Column("expires_at_s", Float(53), nullable=False),
    Index("kept_responses_by_owner", "owner", "expires_at_s"),
)
"""`owner` is the quota's id of the key that asked, empty without keys; `kept` is JSON."""
