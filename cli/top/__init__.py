"""`mlxsup top`: what runs, on the whole screen, and the keys that change it."""
