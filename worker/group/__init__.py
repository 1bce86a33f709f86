"""One model over several ranks: the leader is the worker, and drives a follower on each host."""
