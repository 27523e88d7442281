"""A chat template of each family's own form, in few words, with the control tokens of the family."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from agent_rl.render import ChatModel

_TOKENIZER = Path(__file__).parents[2] / "agent_rl/demo_model/data/tiny-moe/tokenizer.json"
_VISIBLE = "{{ m.content.split('</think>')[-1] }}"
_CALL = "loop.previtem.tool_calls"
_NEEDS_CALL = f"{{% if not {_CALL} %}}{{{{ raise_exception('no call before this result') }}}}{{% endif %}}"


@dataclass(frozen=True, slots=True)
class Form:
    """``template``: what stands around the messages of each role. ``control``: the control tokens, of which the first
    ``eos`` end a turn. ``markup``: further added tokens."""

    template: str
    control: str
    eos: int = 1
    markup: str = "<think> </think>"

    def chat_model(self, kind: str) -> ChatModel:
        """The template with the tokenizer of the demo model and the family's tokens."""
        tokenizer, control = Tokenizer.from_file(str(_TOKENIZER)), self.control.split()
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in self.markup.split()])
        eos = tuple(tokenizer.token_to_id(text) for text in control[: self.eos])
        return ChatModel(tokenizer, self.template, {}, eos, kind)


def _template(*, system: str, user: str, turn: str, tool: str, prompt: str, begin: str = "") -> str:
    return (
        f"{begin}{{% for m in messages %}}{{% if m.role == 'system' %}}{system}{{% elif m.role == 'user' %}}{user}"
        f"{{% elif m.role == 'assistant' %}}{turn}{{% else %}}{tool}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


def _chatml(turn: str = _VISIBLE, opening: str = "", tools: str = "") -> Form:
    said = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    result = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    turn = f"<|im_start|>assistant\n{turn}<|im_end|>\n"
    begin = f"{{% if tools %}}<|im_start|>system\n{tools}{{{{ tools | tojson }}}}<|im_end|>\n{{% endif %}}"
    prompt = f"<|im_start|>assistant\n{opening}"
    template = _template(system=said, user=said, turn=turn, tool=result, prompt=prompt, begin=begin)
    return Form(template, "<|im_end|> <|endoftext|> <|im_start|>", 2, "<think> </think> <tool_call> </tool_call>")


def _glm(opening: str = "", line: str = "") -> Form:
    template = _template(
        begin="[gMASK]<sop>",
        system=f"<|system|>{line}{{{{ m.content }}}}",
        user=f"<|user|>{line}{{{{ m.content }}}}",
        turn=f"<|assistant|>{_VISIBLE}",
        tool=f"<|observation|>{line}<tool_response>{line}{{{{ m.content }}}}{line}</tool_response>",
        prompt=f"<|assistant|>{opening}",
    )
    markup = "<think> </think> <tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>"
    return Form(template, "<|endoftext|> <|user|> <|observation|> <|system|> <|assistant|> [gMASK] <sop>", 3, markup)


def _deepseek(opening: str, tool: str, after_tool: str) -> Form:
    turn = "<｜Assistant｜>" + opening
    first = f"{{% if loop.previtem.role == 'user' %}}{turn}{{% else %}}{after_tool}{{% endif %}}"
    template = _template(
        begin="<｜begin▁of▁sentence｜>",
        system="{{ m.content }}",
        user="<｜User｜>{{ m.content }}",
        turn=f"{first}{_VISIBLE}<｜end▁of▁sentence｜>",
        tool=tool,
        prompt=f"{{% if messages[-1].role == 'user' %}}{turn}{{% else %}}{after_tool}{{% endif %}}",
    )
    calls = "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>"
    outputs = "<｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
    control = "<｜end▁of▁sentence｜> <｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜>"
    return Form(template, control, 1, f"<think> </think> ｜DSML｜ {calls} {outputs}")


_KIMI = Form(
    _template(
        system="<|im_system|>system<|im_middle|>{{ m.content }}<|im_end|>",
        user="<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>",
        turn="<|im_assistant|>assistant<|im_middle|>{{ m.content }}<|im_end|>",
        tool="<|im_system|>{{ m.name or 'tool' }}<|im_middle|>## Return of {{ m.tool_call_id or '' }}\n"
        "{{ m.content }}<|im_end|>",
        prompt="<|im_assistant|>assistant<|im_middle|>",
    ),
    "<|im_end|> <|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|tool_calls_section_begin|> "
    "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>",
)
_MINIMAX = Form(
    _template(
        system="]~!b[]~b]system\n{{ m.content }}[e~[\n",
        user="]~b]user\n{{ m.content }}[e~[\n",
        turn=f"]~b]ai\n{_VISIBLE}{{% if m.tool_calls %}}<minimax:tool_call>"
        "{{ m.tool_calls[0].function.arguments | tojson }}</minimax:tool_call>{% endif %}[e~[\n",
        tool=f"{_NEEDS_CALL}]~b]tool\n<response>{{{{ m.content }}}}</response>[e~[\n",
        prompt="]~b]ai\n<think>\n",
    ),
    "[e~[ ]~!b[ ]~b]",
    markup="<think> </think> <minimax:tool_call> </minimax:tool_call>",
)
_GPT_OSS = Form(
    _template(
        system="<|start|>system<|message|>{{ m.content }}<|end|>",
        user="<|start|>user<|message|>{{ m.content }}<|end|>",
        turn="<|start|>assistant{% if m.tool_calls %}{% set call = m.tool_calls[0].function %} "
        "to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>"
        "{% else %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}",
        tool=f"{_NEEDS_CALL}<|start|>functions.{{{{ {_CALL}[0].function.name }}}} to=assistant<|channel|>commentary"
        "<|message|>{{ m.content | tojson }}<|end|>",
        prompt="<|start|>assistant",
    ),
    "<|return|> <|call|> <|end|> <|start|> <|message|> <|channel|> <|constrain|>",
    2,
)
_ERNIE = Form(
    _template(
        begin="<|begin_of_sentence|>",
        system="{{ m.content }}\n",
        user="User: {{ m.content }}\n",
        turn="Assistant: {{ m.content }}</s>",
        tool="",
        prompt="Assistant: ",
    ),
    "</s> <|begin_of_sentence|>",
)
_OLMOE = Form(
    _template(
        begin="<|endoftext|>",
        system="<|system|>\n{{ m.content }}\n",
        user="<|user|>\n{{ m.content }}\n",
        turn="<|assistant|>\n{{ m.content }}<|endoftext|>\n",
        tool="",
        prompt="<|assistant|>\n",
    ),
    "<|endoftext|>",
)
_MIXTRAL = Form(
    _template(
        begin="<s>",
        system="",
        user="[INST] {% if loop.previtem.role == 'system' %}{{ loop.previtem.content }}\n\n{% endif %}"
        "{{ m.content }} [/INST]",
        turn="{{ m.content }}</s>",
        tool="{{ raise_exception('no role tool') }}",
        prompt="",
    ),
    "</s> <s>",
)
_RESULTS = "{{ '\n\n' }}<function_results>\n<result>{{ m.content }}</result>\n</function_results>\n\n"
_QWEN3_5 = _chatml(opening="<think>\n", tools="Calls: <tool_call>\n<function=NAME>\n</function>\n</tool_call>\n")

FORMS: dict[str, Form] = {
    "qwen2_moe": _chatml("{{ m.content }}"),
    "qwen3_moe": _chatml(),
    "qwen3_next": _chatml(opening="<think>\n"),
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    "nemotron_h": _QWEN3_5,
    "glm4_moe": _glm(line="\n"),
    "glm_moe_dsa": _glm("<think>"),
    "deepseek_v3": _deepseek("</think>", "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>", ""),
    "deepseek_v32": _deepseek("<think>", _RESULTS, "<think>"),
    "kimi_k2": _KIMI,
    "minimax_m2": _MINIMAX,
    "gpt_oss": _GPT_OSS,
    "ernie4_5_moe": _ERNIE,
    "olmoe": _OLMOE,
    "mixtral": _MIXTRAL,
}
"""By ``model_type``. DeepSeek-V3.2 is published without a template: the form is that of its encoding script."""
