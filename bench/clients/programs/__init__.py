"""Other people's programs against the gateway: each in a separate environment below build/."""
