"""The pure part of the supervisor: events in, actions out; no clock, no sockets, no processes.

`now` is in monotonic seconds, wherever it is passed.

The shell (`supervisor/app.py`) calls `Core.handle(event)` and carries out the actions that it
returns, in order. One turn:

1. The event goes to `client_events.py`, `workers.py` or `core.py`. They answer, change a
   request, or apply a *trigger* to a model's life.
2. `transitions.py` changes the `Life` and returns what follows: *actions* (spawn, signal, send),
   and answers to requests and callers, which a life knows nothing about. `fleet.py` carries both
   out.
3. `Fleet.run_policies` looks at every model that was *touched*: it ends drains, grants turns to
   load, dispatches waiting requests, and notifies their clients. Touching is enough: no handler
   calls spawn or dispatch.
4. The shell gets the actions in the outbox.

docs/architecture.md says where things go.
"""
