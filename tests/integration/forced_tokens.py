"""Runs inside of SGLang's scheduler: makes a request sample given tokens, one after another.

SGLang's log-prob of a token that is forced by its logits is 0. So the log-prob of the model's own distribution is
returned beside it, as ``meta_info["model_logprobs"]``. Nothing of this project is imported: the engine's environment
lacks it.
"""

from __future__ import annotations

import json
import operator
import pickle
import runpy
from typing import Any

import torch


class ForcedTokens:
    """A custom logit processor of SGLang; ``custom_params`` of a request: its ``tokens``."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]]) -> torch.Tensor:
        for row, params in zip(logits, custom_param_list, strict=True):
            request = params["__req__"]
            token = params["tokens"][len(request.output_ids)]
            own = float(row.log_softmax(-1)[token])
            earlier = (request.customized_info or {}).get("model_logprobs", [])
            kept = earlier[: len(request.output_ids)]  # each part of a chunked prompt samples a token that is dropped
            request.customized_info = {"model_logprobs": [*kept, own]}
            row.fill_(float("-inf"))
            row[token] = 0
        return logits


class _ThisFile:
    def __reduce__(self) -> tuple[Any, ...]:
        return runpy.run_path, (__file__,)


class _ForcedTokens:
    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, (_ThisFile(), "ForcedTokens")


def processor() -> str:
    """The value of a request's ``custom_logit_processor``, which names this file."""
    return json.dumps({"callable": pickle.dumps(_ForcedTokens()).hex()})
