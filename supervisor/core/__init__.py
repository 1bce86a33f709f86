"""The pure part of the supervisor: events in, actions out; no clock, no sockets, no processes.

`now` is in monotonic seconds, wherever it is passed.

The shell (`supervisor/app.py`) calls `Core.handle(event)` and carries out the actions that it
returns, in order. One turn:

1. The event goes to `client_events.py`, `worker_events.py` or `core.py`. They answer, change a
   request, or apply a *trigger* to a model's life.
2. The function of this phase in `lifecycle/transitions.py` changes the `Life` and adds *actions*
   (spawn, signal, send) and *effects*: what must happen to requests and callers, which a life
   knows nothing about. `fleet.py` carries both out.
3. `Fleet.run_policies` looks at every model that was *touched*: it ends drains, grants turns to
   load, dispatches waiting requests, and notifies their clients. Touching is enough: no handler
   calls spawn or dispatch.
4. The shell gets the actions in the outbox.

Where things go:

- a command of clients: a handler in `client_events.py`
- a message of workers: a handler in `worker_events.py`
- a state: a phase in `lifecycle/states.py`, and its function in `lifecycle/transitions.py`
- an event of a worker's life: a trigger in `lifecycle/triggers.py`, and its cases there
- what follows an exit: `lifecycle/exits.py`; how long to wait: `lifecycle/restart_policy.py`
- whether a request may wait: `admission.py`; which is next: `requests/queue.py`
- how a request ends: `endings.py`, the only sender of terminal messages
- which models read long prompts now: `prefill_slots.py`
- stalls, causes of death, whom to blame: `health/`; how suspects take turns: `probation.py`
"""
