"""`mlxsup doctor --prove`: figures that are measured on the user's own model, and judged."""
