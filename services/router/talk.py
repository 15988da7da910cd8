"""A chat request's own side: the prompt with its tools, how the answer is to be read, and what it must match."""

from __future__ import annotations

import msgspec

from services.router.dialects import THINK, THOUGHT
from services.router.messages import chat_messages
from services.router.model import ServedModel
from services.router.openai_types import ChatRequest
from services.router.reasoning import Begins, begins
from services.router.speech import Manners
from services.router.structured import Constraint, constraint
from services.router.tools import Tools, calls_grammar, only_calls, tools_of
from services.router.validate import Job, chat_ending, template_kwargs


class Talk(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str
    manners: Manners | None
    constraint: Constraint | None
    begins: Begins
    """How the output begins: where a thought may come first, what it must match comes after it."""

    @classmethod
    def of(cls, request: ChatRequest, model: ServedModel) -> Talk:
        """Raises `RequestError`."""
        manner, tools, ending = model.manner, tools_of(request, model.manner), chat_ending(request)
        prompt = model.chat_prompt(
            chat_messages(request.messages, arguments_as_text=manner.arguments_as_text),
            template_kwargs(request, model),
            tools.for_template if tools is not None else None,
            ending,
        )
        begin: Begins = begins(prompt) if manner.thinks and ending == "generation" else "closed"
        markers = {THINK, THOUGHT} if manner.thinks else set()
        manners = Manners(
            thinks=begin,
            dialect=tools.dialect if tools is not None else None,
            functions=tools.names if tools is not None else frozenset(),
            parallel=tools is None or tools.parallel,
            reveals=request.include_reasoning is not False,
            shown=model.special_tokens(markers | (tools.dialect.markers if tools is not None else set())),
        )
        return cls(
            prompt=prompt,
            manners=manners if manner.thinks or tools is not None else None,
            constraint=_constraint(request, tools, model),
            begins=begin,
        )

    def mannered(self, job: Job) -> Job:
        return job if self.manners is None else msgspec.structs.replace(job, manners=self.manners)


def _constraint(request: ChatRequest, tools: Tools | None, model: ServedModel) -> Constraint | None:
    """A forced call leaves room for nothing else; otherwise the output is calls, or what was asked of it."""
    wanted = constraint(request)
    if tools is None:
        return wanted
    if tools.forced or wanted is None:
        calls = calls_grammar(tools, model.marker)
        return None if calls is None else Constraint(({"lark_grammar": calls},), "tools")
    calls = only_calls(tools, model.marker)
    return Constraint((*wanted.entries, {"lark_grammar": calls}), wanted.param)
