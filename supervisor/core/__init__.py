"""The pure part of the supervisor: events in, actions out; no clock, no sockets, no processes."""
