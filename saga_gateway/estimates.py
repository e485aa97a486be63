"""What a request and its task are expected to need, learned from those before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from saga_core.coordinator_events import RequestArrived
from saga_core.graph import Graphs
from saga_gateway.answers import Usage
from saga_gateway.exchange import Exchange
from saga_gateway.sessions import Session

# How much the newest value counts among those before it.
_SHARE = 1.0 / 64.0
_MAX_PREFIXES = 10_000
_LEAST_S = 1e-3


class Estimates:
    """Means over the fleet's traffic, and per session what its last answer said.

    Nothing here decides whether a request is served, only in which order and where: a wrong
    estimate costs time, never an answer.

    Attributes:
        prefill_tokens_per_s: as workers measure it.
    """

    def __init__(self, graphs: Graphs, prefill_tokens_per_s: float) -> None:
        self._graphs = graphs
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self._tokens_per_byte = 0.25
        self._output_tokens = 200.0
        self._decode_s = 0.03
        self._step_s = 1.0
        self._request_s = 5.0
        self._prefixes: OrderedDict[Hashable, int] = OrderedDict()

    def arrival(self, exchange: Exchange, request_id: str, now_s: float) -> RequestArrived:
        """The request, with what it and its task are expected to need."""
        session = exchange.session
        size = len(exchange.request.body)
        output_tokens = int(self._output_tokens) if exchange.is_step else 0
        deadline_s = None
        if exchange.deadline_ms is not None:
            deadline_s = now_s + exchange.deadline_ms / 1000.0
        if session is None:
            prompt_tokens = int(size * self._tokens_per_byte)
            return RequestArrived(
                now_s,
                request_id,
                tenant=exchange.tenant or "",
                task_id=exchange.task_id,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                step_s=self._cost_s(prompt_tokens, output_tokens),
                deadline_s=deadline_s,
                task_s=self._request_s,
                only_worker=exchange.home,
            )
        prompt_tokens = self._prompt_tokens(session, size)
        new_tokens = max(0, prompt_tokens - session.tokens)
        step_s = self._cost_s(new_tokens, output_tokens)
        if session.steps_left is None:
            # Until its first pause, what is known of its workflow says how long it will be.
            outlook = self._graphs.outlook(session.walk)
            session.steps_left = 0.0 if outlook.is_cold else outlook.steps_left
            session.pause_s = outlook.pause_p50_s
        steps_left = session.steps_left
        prefix_id, prefix_tokens = self._prefix(session)
        return RequestArrived(
            now_s,
            request_id,
            tenant=exchange.tenant or "",
            session_id=session.session_id,
            task_id=exchange.task_id,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            prefix_id=prefix_id,
            prefix_tokens=prefix_tokens,
            step_s=step_s,
            work_s=step_s + steps_left * self._step_s,
            deadline_s=deadline_s,
            task_s=self._request_s + steps_left * (self._request_s + session.pause_s),
            only_worker=exchange.home,
        )

    def ended(self, exchange: Exchange, usage: Usage | None, now_s: float) -> None:
        """A request was answered; ``usage`` are the token counts that the answer has said."""
        self._request_s = _mean(self._request_s, now_s - exchange.began_s)
        size, session = len(exchange.request.body), exchange.session
        if usage is None or not usage.prompt_tokens:
            return
        is_first = session is not None and not session.tokens
        if is_first and size:
            # Of later steps the body may hold no more than what is new.
            self._tokens_per_byte = _mean(self._tokens_per_byte, usage.prompt_tokens / size)
        if exchange.is_step:
            self._output_tokens = _mean(self._output_tokens, usage.completion_tokens)
        if exchange.first_s is not None and usage.completion_tokens > 1:
            token_s = (now_s - exchange.first_s) / (usage.completion_tokens - 1)
            self._decode_s = _mean(self._decode_s, token_s)
        cached = usage.cached_tokens or 0
        step_s = self._cost_s(usage.prompt_tokens - cached, usage.completion_tokens)
        self._step_s = _mean(self._step_s, step_s)
        if session is None:
            return
        if is_first and cached:
            self._prefixes[session.walk.workflow] = cached
            self._prefixes.move_to_end(session.walk.workflow)
            if len(self._prefixes) > _MAX_PREFIXES:
                self._prefixes.popitem(last=False)
        session.prompt_tokens = usage.prompt_tokens
        session.tokens = usage.prompt_tokens + usage.completion_tokens
        session.body_bytes = size

    def _prompt_tokens(self, session: Session, size: int) -> int:
        grown = size - session.body_bytes
        if not session.tokens or grown < 0:
            return int(size * self._tokens_per_byte)
        return session.prompt_tokens + int(grown * self._tokens_per_byte)

    def _prefix(self, session: Session) -> tuple[str, int]:
        """What its workflow's sessions begin with: what the first steps found cached."""
        tokens = self._prefixes.get(session.walk.workflow, 0)
        return (str(session.walk.workflow), tokens) if tokens else ("", 0)

    def _cost_s(self, new_tokens: int, output_tokens: int) -> float:
        prefill_s = new_tokens / self.prefill_tokens_per_s
        return max(_LEAST_S, prefill_s + output_tokens * self._decode_s)


def _mean(before: float, value: float) -> float:
    return before + _SHARE * (value - before)
