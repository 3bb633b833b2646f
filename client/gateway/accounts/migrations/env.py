"""Alembic's environment: runs revisions on the connection that it is given, in the transaction that is open there."""

from alembic import context

from molink.client.gateway.accounts.schema import METADATA

context.configure(
    connection=context.config.attributes["connection"], target_metadata=METADATA, transactional_ddl=True
)
context.run_migrations()
