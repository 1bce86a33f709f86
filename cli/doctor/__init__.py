"""The checks of `mlxsup doctor`: functions that return findings, each of which names its fix.

The doctor changes nothing, because a doctor that repairs is run by scripts and then read by no
person. It names a command only if that command is the fix.
"""
