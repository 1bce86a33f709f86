"""Cases of client packages, which real daemons must pass."""
