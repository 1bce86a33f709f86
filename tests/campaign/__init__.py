"""Strike a running daemon, read what its clients get, and judge it by its promises.

`python -m campaign --list` names the scenarios; each starts a daemon, strikes, reads and judges.
"""
