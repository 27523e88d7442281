"""Messages to tokens and back: token-in, token-out, append-only."""

from agent_rl.render.chat import ChatRenderer
from agent_rl.render.template import ChatModel
