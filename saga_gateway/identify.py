"""Sessions and workflows of clients that name none, told by the content of their requests."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from saga_core.conversations import Conversations, Relation
from saga_core.prompts import Prompt, PromptReader
from saga_core.workflows import WorkflowClasses
from saga_gateway.answers import Answer

logger = logging.getLogger(__name__)

_ID_BYTES = 12
_MAX_READ_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Identified:
    """What the content of a request tells.

    Attributes:
        session_id: the session that it is counted to.
        relation: what it is to that session.
        parent_id: the session that it branches from, of a fork.
        workflow_id: the class of requests that it belongs to.
        observed_chars: length of what was added after the last answer.
        prompt_chars, known_chars: length of the prompt, and of what the session had of it before;
            0 where the request holds only what is new.
        is_named: the request names the response that it goes on from.
    """

    session_id: str
    relation: Relation
    parent_id: str | None
    workflow_id: str
    observed_chars: int
    prompt_chars: int = 0
    known_chars: int = 0
    is_named: bool = False

    @property
    def is_retry(self) -> bool:
        """Whether it says once more what was said before."""
        return self.relation is Relation.RETRY


class Identifier:
    """Tells sessions and workflows apart. No content is kept: keyed hashes and lengths alone.

    Args:
        secret: key of the hashes; equal in all replicas.
        max_sessions: conversations remembered; the least recently used one goes first.
    """

    def __init__(self, secret: bytes, max_sessions: int) -> None:
        self._reader = PromptReader(secret)
        self._conversations = Conversations(max_sessions, _new_id)
        self._classes = WorkflowClasses()

    def session(
        self, api: str, tenant: str | None, body: bytes, follows: str | None, *, is_running: bool
    ) -> Identified | None:
        """The session of a request that names none; None when its body does not tell.

        Its answer, or that there is none, is to be told: :meth:`ended`.

        Args:
            api: as in :meth:`PromptReader.read`.
            follows: the session of the response that the request goes on from.
            is_running: whether a request of that session is being served.
        """
        try:
            return self._session(api, tenant, body, follows, is_running=is_running)
        except Exception as error:  # noqa: BLE001 - whatever a client sends, it is relayed
            logger.warning("a request is served without a session: %s", type(error).__name__)
            return None

    def _session(
        self, api: str, tenant: str | None, body: bytes, follows: str | None, *, is_running: bool
    ) -> Identified | None:
        content, prompt = self._read(api, body)
        if prompt is None:
            return None
        scope = hash(tenant)
        workflow = self._workflow(scope, api, content, prompt)
        if follows is not None:
            return Identified(
                _new_id() if is_running else follows,
                Relation.FORK if is_running else Relation.CONTINUES,
                follows if is_running else None,
                workflow,
                prompt.observed_chars,
                is_named=True,
            )
        digest_of = self._reader.digest_of(content) if api == "completions" else None
        match = self._conversations.arrived(scope, prompt.pieces, digest_of)
        sizes = [piece.size for piece in prompt.pieces]
        return Identified(
            match.session_id,
            match.relation,
            match.parent_id,
            workflow,
            prompt.observed_chars,
            prompt_chars=sum(sizes),
            known_chars=sum(sizes[: match.known_pieces]),
        )

    def workflow(self, api: str, tenant: str | None, body: bytes) -> str | None:
        """The workflow of a request that names its session, but no workflow."""
        try:
            content, prompt = self._read(api, body)
            return None if prompt is None else self._workflow(hash(tenant), api, content, prompt)
        except Exception as error:  # noqa: BLE001 - whatever a client sends, it is relayed
            logger.warning("a request is served without a workflow: %s", type(error).__name__)
            return None

    def ended(self, found: Identified, answer: Answer | None) -> None:
        """The request is over; None: it was not answered, or not so that it could be read."""
        if found.is_named:
            return
        pieces = None
        try:
            if answer is not None:
                pieces = self._reader.answer(answer.text, answer.calls)
        except Exception as error:  # noqa: BLE001 - whatever a client sends, it is relayed
            logger.warning("a session goes on without its answer: %s", type(error).__name__)
        if pieces is None:
            self._conversations.failed(found.session_id)
        else:
            self._conversations.answered(found.session_id, pieces)

    def _read(self, api: str, body: bytes) -> tuple[Mapping[str, Any], Prompt | None]:
        if len(body) > _MAX_READ_BYTES:
            return {}, None  # Other requests would wait for it.
        try:
            content = orjson.loads(body)
        except orjson.JSONDecodeError:
            return {}, None  # The worker says what is wrong with it.
        if not isinstance(content, dict):
            return {}, None
        return content, self._reader.read(api, content)

    def _workflow(self, scope: int, api: str, content: Mapping[str, Any], prompt: Prompt) -> str:
        known = self._classes.known(scope, prompt.shape)
        if known is not None:
            return known
        return self._classes.learn(scope, prompt.shape, self._reader.template(api, content))


def _new_id() -> str:
    return f"c-{secrets.token_hex(_ID_BYTES)}"
