"""The page at `/`: what a daemon does, buttons, and a chat; browsers get `files/`."""
