"""How other programs get to use a daemon: what goes into which of their files, and back.

As little as possible changes in files that people write. An undo happens only if the file is as it
was written, and a second write keeps the first copy.
"""
