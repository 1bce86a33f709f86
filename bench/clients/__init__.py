"""What real client packages and programs can do with the gateway, and with mlx_lm.server."""
