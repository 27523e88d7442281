"""The exceptions of agent_rl.

::

    AgentRlError
    ├── UserError                a user's mistake; exit code 2; one line: the error, its place, what would be right
    │   ├── ConfigError          invalid config file or override
    │   └── TemplateError        chat template that is not prefix-preserving
    ├── EngineError              the engine failed; counted as infrastructure
    │   ├── EngineStartError     the server failed to start; the message quotes its log
    │   ├── EngineUnreachable    no response (connection refused, timeout); retried within a budget
    │   ├── EngineOverloaded     status 429 or 503; retried within a budget
    │   ├── EngineRejected       status 4xx; never retried
    │   │   ├── GrammarRefused, GrammarsUnsupported
    │   │   └── EngineKeyRefused status 401 or 403; the API key is missing or wrong
    │   ├── EngineAborted        the server aborted the request
    │   ├── EngineStale          the response used other weights than the published ones; retried within a budget
    │   ├── EngineLost           no engine serves, and none will in time
    │   └── RoutesMissingError   routes are missing, misshapen or out of range; stops the run
    ├── HarnessError             an agent program failed; counted as infrastructure
    ├── WeightSyncError          a weight update failed
    ├── TrainerError             the trainer failed
    │   └── TrainerDied          a trainer process died; restarts from the last checkpoint
    ├── GuardStop                the guard ended the run after a checkpoint; exit code 3
    └── RolloutFailed            a group was not completed within its retry budget
"""

from __future__ import annotations

from pathlib import Path


class AgentRlError(Exception):
    """Base of all errors of agent_rl."""


class UserError(AgentRlError):
    """A user's mistake."""


class ConfigError(UserError):
    """A config file or an override is invalid."""


class TemplateError(UserError):
    """A chat template that is not prefix-preserving."""


class EngineError(AgentRlError):
    """The engine failed."""


class EngineStartError(EngineError):
    """The engine server failed to start."""


class EngineUnreachable(EngineError):
    """The engine did not respond."""


class EngineOverloaded(EngineError):
    """The engine is overloaded (status 429 or 503)."""


class EngineRejected(EngineError):
    """The engine refused the request."""


class GrammarRefused(EngineRejected):
    """No grammar of the engine expresses the form."""


class GrammarsUnsupported(EngineRejected):
    """The engine converts no forms to grammars: agent-rl did not launch it."""


class EngineKeyRefused(EngineRejected):
    """The API key is missing or wrong (status 401 or 403)."""


class EngineAborted(EngineError):
    """The engine aborted the request."""


class EngineStale(EngineError):
    """The response used other weights than the published ones."""


class EngineLost(EngineError):
    """No engine serves, and none will in time."""


class RoutesMissingError(EngineError):
    """Routes are missing, misshapen or out of range."""


class HarnessError(AgentRlError):
    """An agent program failed, or ended without sending a request."""


class WeightSyncError(AgentRlError):
    """A weight update failed."""


class TrainerError(AgentRlError):
    """The trainer failed."""


class TrainerDied(TrainerError):
    """A trainer process died."""


class GuardStop(AgentRlError):
    """The guard ended the run. ``last_good``: the newest checkpoint from before the collapse."""

    def __init__(self, message: str, last_good: Path | None = None) -> None:
        super().__init__(message)
        self.last_good = last_good


class RolloutFailed(AgentRlError):
    """A group was not completed within its retry budget."""
