"""The sockets of the supervisor: the one that clients connect to, and two for each worker."""
