"""What `mlxsup doctor` looks at: facts are gathered, checks judge them, findings name fixes.

The doctor changes nothing, because a doctor that repairs is run by scripts and then read by no
person. It names a command only if that command is the fix.
"""
