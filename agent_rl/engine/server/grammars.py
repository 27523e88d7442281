"""Grammars for constrained sampling, in a server that detokenizes nothing (``--skip-tokenizer-init``).

``POST /grammar`` converts a format, XGrammar's structural tag without its envelope, to the EBNF text of a grammar that
a request then sends as SGLang's ``ebnf``. JSON in it has one space after each comma and colon and no other white space
between tokens: where white space is free, SGLang 0.5.23's forced calls write it until the length limit.

The scheduler loads the tokenizer at the first grammar, outside of its own thread. A grammar also ends at the request's
``stop_token_ids``. ``custom_params: {"grammar_prefix": n}`` continues a reply: its grammar first accepts the last n
tokens of the prompt, which an earlier request sampled under it.

Runs in the engine's environment, which has no other module of this project.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import threading
from collections.abc import Callable
from typing import Any

import xgrammar
from sglang.srt.constrained import base_grammar_backend, grammar_manager, json_schema_validation, xgrammar_backend

PATH = "/grammar"
PREFIX = "grammar_prefix"
_ROLLBACK = xgrammar_backend.MAX_ROLLBACK_TOKENS
_BOUNDS = {"enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_SOURCE = re.compile(r"^\[[^]]*\] \S+:\d+: ")


class LazyBackend(base_grammar_backend.BaseGrammarBackend):
    """XGrammar's backend, loaded by ``load`` in the thread that compiles the first grammar."""

    def __init__(self, load: Callable[[], Any]) -> None:
        super().__init__()
        self._load, self._lock = load, threading.Lock()
        self._loaded: Any = None

    def dispatch_ebnf(self, key_string: str) -> Any:
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
        return self._loaded.dispatch_ebnf(key_string)

    def reset(self) -> None:
        super().reset()
        if self._loaded is not None:
            self._loaded.reset()


def install() -> None:
    """Let this process's scheduler constrain requests."""
    manager = grammar_manager.GrammarManager
    init, apply = manager.__init__, manager._apply_request_reasoning_config

    def init_with_backend(self: Any, scheduler: Any) -> None:
        init(self, scheduler)
        if self.grammar_backend is None:
            self.grammar_backend = LazyBackend(lambda: _load(scheduler))

    def begin(self: Any, req: Any) -> None:
        apply(self, req)
        if isinstance(req.grammar, xgrammar_backend.XGrammarGrammar):
            _begin(req, self.scheduler.model_config.hf_eos_token_id or ())

    manager.__init__, manager._apply_request_reasoning_config = init_with_backend, begin


def _load(scheduler: Any) -> Any:
    """XGrammar's backend with the tokenizer of the checkpoint."""
    context = importlib.import_module("sglang.srt.runtime_context")
    serving, model = context.get_serving(), context.get_model()
    tokenizer = importlib.import_module("sglang.srt.utils.hf_transformers_utils").get_tokenizer(
        serving.tokenizer_path,
        tokenizer_mode=serving.tokenizer_mode,
        trust_remote_code=model.trust_remote_code,
        revision=model.revision,
    )
    config = scheduler.model_config
    return xgrammar_backend.XGrammarGrammarBackend(
        tokenizer, config.vocab_size, list(config.hf_eos_token_id or ()) or None
    )


def _begin(req: Any, end_ids: Any) -> None:
    """Give ``req`` a matcher that ends at ``end_ids`` and its stop tokens, after the part sampled before."""
    params, grammar = req.sampling_params, req.grammar
    ends = sorted({*end_ids, *(params.stop_token_ids or ())})
    grammar.matcher = xgrammar.GrammarMatcher(
        grammar.ctx, max_rollback_tokens=_ROLLBACK, override_stop_tokens=ends or None
    )
    count = int((params.custom_params or {}).get(PREFIX, 0))
    for token in req.origin_input_ids[len(req.origin_input_ids) - count :]:
        if not grammar.matcher.accept_token(token):
            req.set_finish_with_abort(f"{PREFIX}: token {token} does not fit the grammar")
            return


def to_ebnf(form: Any) -> str:
    """The grammar of a format. Raises ValueError, RuntimeError or RecursionError for one that cannot be expressed."""
    return str(xgrammar.Grammar.from_structural_tag(json.dumps({"type": "structural_tag", "format": _tight(form)})))


def _tight(form: Any) -> Any:
    """``form`` with each JSON schema as a grammar without free white space."""
    if isinstance(form, list):
        return [_tight(each) for each in form]
    if not isinstance(form, dict):
        return form
    if form.get("type") != "json_schema":
        return {key: _tight(value) for key, value in form.items()}
    schema = form.get("json_schema")
    json_schema_validation.validate_xgrammar_json_schema(schema)
    for part, pointer in json_schema_validation._iter_subschemas(schema):
        if len(part.get("allOf", ())) > 1:
            raise ValueError(f"JSON Schema at {pointer}: allOf of several schemas would be ignored")
        if part.get("type") == "integer" and not _BOUNDS & part.keys():
            part |= {"minimum": -(2**53), "maximum": 2**53}  # else any number of digits
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False)
    return {"type": "grammar", "grammar": str(grammar)}


def serve(app: Any) -> None:
    """Add the route to the web server's ``app``."""
    responses, routing = importlib.import_module("starlette.responses"), importlib.import_module("starlette.routing")

    async def convert(request: Any) -> Any:
        try:
            form = (await request.json())["format"]
            if base_grammar_backend._grammar_key_contains_nul("json", json.dumps(form)):
                raise ValueError("a NUL character")
            text = await asyncio.to_thread(to_ebnf, form)
        except (ValueError, KeyError, TypeError, RuntimeError, RecursionError) as error:
            return responses.JSONResponse({"error": _one_line(error)}, 400)
        return responses.JSONResponse({"ebnf": text})

    app.router.routes.append(routing.Route(PATH, convert, methods=["POST"]))


def _one_line(error: BaseException) -> str:
    """The error's text without the time and the place in XGrammar's source."""
    return _SOURCE.sub("", " ".join(str(error).split()))[:300]
