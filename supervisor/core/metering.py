"""Charges engine steps to the requests, the accounts and the models that they were made for."""

from __future__ import annotations

import math

from mlxsup.protocol.ids import ModelName, RequestKey
from mlxsup.protocol.worker_messages import Step

from .model import Model
from .sharing.accounting import AlikeSteps, DeviceTime, charge


class Meter:
    """Counts engine seconds; engines that compute on the same backend share a device.

    `Model.settle` charges the steps of a model that have not been charged yet.
    """

    def __init__(self) -> None:
        # Bounded: there are three backends, and the fake one.
        self._devices: dict[str, DeviceTime] = {}
        self._working: dict[ModelName, Model] = {}

    def works(self, model: Model, now: float) -> None:
        """The engine has accepted a request, or got its lease; it may have been at work before."""
        if model.name not in self._working:
            self._settle_all()
            self._device_of(model).begins(model.name, now)
            self._working[model.name] = model

    def rests(self, model: Model, now: float) -> None:
        """The engine holds no request any longer or waits for a lease, or its process is gone."""
        if model.name in self._working:
            self._settle_all()
            self._device_of(model).rests(model.name, now)
            del self._working[model.name]

    def add(self, model: Model, step: Step, now: float) -> None:
        """Charge a step, now or with those after it; nothing of it has changed a request yet."""
        alike = model.totals.alike
        if (
            alike is not None
            and [row.key for row in step.rows] == alike.keys
            and not step.prefill
            and not step.between_steps
        ):
            alike.took_s += step.took_s
            alike.at = now
        else:
            self._charge(model, step, now)

    def _charge(self, model: Model, step: Step, now: float) -> None:
        model.settle()
        running = model.batch.running
        if not running and not model.batch.leaving:
            return
        self.works(model, now)
        device = self._device_of(model)
        cost_s = device.cost_s(model.name, max(step.took_s, 0.0), now)

        def read_before(key: RequestKey) -> float:
            request = running.get(key)
            if request is None:
                return 0.0
            is_read = request.sent.tokens and not request.answers_while_reading
            return math.inf if is_read else request.cost.read_tokens

        charges = charge(step, cost_s, read_before)
        for key, seconds in charges.requests.items():
            request = running.get(key)
            if request is not None:
                model.pay(request, seconds)
        for row in step.prefill:
            request = running.get(row.key)
            if request is not None and row.done > request.cost.read_tokens:
                request.cost.read_tokens = row.done
        model.totals.engine_s += sum(charges.requests.values())
        model.totals.repeated_s += charges.repeated_s
        keys = [row.key for row in step.rows]
        are_all = keys and len(keys) == len(charges.requests)
        if are_all and not step.prefill and not step.between_steps:
            payers = [running[key] for key in charges.requests if key in running]
            model.totals.alike = AlikeSteps(device=device, payers=payers, keys=keys, at=now)

    def _settle_all(self) -> None:
        """Who works is about to change, and with it what a second of each engine costs."""
        for model in self._working.values():
            model.settle()

    def _device_of(self, model: Model) -> DeviceTime:
        backend = model.process.ready.backend if model.process.ready else ""
        device = self._devices.get(backend)
        if device is None:
            device = self._devices[backend] = DeviceTime()
        return device
