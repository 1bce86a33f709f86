"""The whole configuration file, as its tables are read."""

from __future__ import annotations

from pydantic import Field

from .client_table import ClientTable
from .gateway_table import GatewayTable
from .kinds import Table
from .tables import ModelTable, SupervisorTable


class FileTable(Table):
    """The whole file; the entries of `clients` and `models` are also checked one by one."""

    supervisor: SupervisorTable = Field(
        default_factory=SupervisorTable, title="the daemon itself", description="a table"
    )
    gateway: GatewayTable | None = Field(
        None, title="the HTTP gateway; without this table there is none", description="a table"
    )
    clients: dict[str, ClientTable] = Field(
        default_factory=dict,
        title='clients by name; "*" is for all that have no entry',
        description="a table for each client, [clients.NAME]",
    )
    defaults: ModelTable = Field(
        default_factory=ModelTable,
        title="defaults for all models: any key of [models.NAME]",
        description="a table",
    )
    models: dict[str, ModelTable] = Field(
        default_factory=dict,
        title="the models to serve, by name",
        description="a table for each model, [models.NAME]",
    )
