"""Errors of agent_rl.

::

    AgentRlError
    ├── UserError                a user's mistake: one line saying what, where and what would be right; exit code 2
    │   ├── ConfigError          a config file or an override is wrong
    │   └── TemplateError        a chat template that is not prefix-preserving
    ├── EngineError              the engine failed: infrastructure, never the policy's fault
    │   ├── EngineStartError     the server could not be started; the message holds its log's reason
    │   ├── EngineUnreachable    no answer (connection refused, timeout): retried on a budget
    │   ├── EngineOverloaded     429 or 503: retried on a budget
    │   ├── EngineRejected       4xx: the request is wrong, never retried
    │   │   └── EngineKeyRefused 401 or 403: another key is wanted
    │   ├── EngineAborted        the request was aborted by the server
    │   ├── EngineStale          it answered from other weights than the published ones: retried on a budget
    │   ├── EngineLost           no engine serves, and none will in time
    │   └── RoutesMissingError   routes absent, of the wrong shape or out of range: stops the run
    ├── WeightSyncError          a weight update was not taken
    ├── TrainerError             the trainer failed
    │   └── TrainerDied          a process of it ended: started again, it goes on from its last checkpoint
    ├── GuardStop                the run's guard ended it, a checkpoint is there; exit code 3
    └── RolloutFailed            a group could not be collected within its retry budget
"""

from __future__ import annotations


class AgentRlError(Exception):
    """Base of all errors of agent_rl."""


class UserError(AgentRlError):
    """A user's mistake."""


class ConfigError(UserError):
    """A config file or an override is wrong."""


class TemplateError(UserError):
    """A chat template that is not prefix-preserving."""


class EngineError(AgentRlError):
    """The engine failed."""


class EngineStartError(EngineError):
    """The engine server could not be started."""


class EngineUnreachable(EngineError):
    """The engine gave no answer."""


class EngineOverloaded(EngineError):
    """The engine asked to come back later."""


class EngineRejected(EngineError):
    """The engine refused the request."""


class EngineKeyRefused(EngineRejected):
    """The engine, or a gateway before it, wants another key."""


class EngineAborted(EngineError):
    """The engine aborted the request."""


class EngineStale(EngineError):
    """The engine answered from other weights than the published ones."""


class EngineLost(EngineError):
    """No engine serves, and none will in time."""


class RoutesMissingError(EngineError):
    """Routes absent, of the wrong shape, or out of range."""


class HarnessError(AgentRlError):
    """An agent program broke, or ended without having asked for anything: infrastructure."""


class WeightSyncError(AgentRlError):
    """A weight update was not taken."""


class TrainerError(AgentRlError):
    """The trainer failed."""


class TrainerDied(TrainerError):
    """A process of the trainer ended."""


class GuardStop(AgentRlError):
    """The run's guard ended it."""


class RolloutFailed(AgentRlError):
    """A group could not be collected within its retry budget."""
