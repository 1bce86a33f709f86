"""The flight recorder read aloud: what `mlxsup why` says."""
