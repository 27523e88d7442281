"""Every metric of a run, registered: its name, its unit, what it is, and the file that makes it.

A step's metrics go through :class:`agent_rl.monitoring.metrics_log.MetricsLog`, which refuses a name that is not
here. The tables of docs/metrics.md are made from here::

    python -m agent_rl.monitoring.metrics docs/metrics.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from agent_rl.config import MAX_STALENESS
from agent_rl.errors import AgentRlError
from agent_rl.types import StopReason


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the registry. ``name`` may hold one ``<placeholder>``, which stands for each of ``values``.

    ``text`` is one sentence; ``source`` is the file that makes the metric.
    """

    name: str
    unit: str
    text: str
    source: str
    values: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """The part of the name before the slash."""
        return self.name.partition("/")[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that this row registers."""
        return tuple(re.sub("<.*>", value, self.name) for value in self.values) or (self.name,)


def _of(source: str, *rows: tuple[str, str, str]) -> tuple[Metric, ...]:
    return tuple(Metric(name, unit, text, source) for name, unit, text in rows)


def _without_replay(metrics: Iterable[Metric]) -> tuple[Metric, ...]:
    return tuple(
        replace(
            metric,
            name=f"mismatch_without_replay/{metric.name.partition('/')[2]}",
            text=f"`{metric.name}` of the pass in which the trainer chooses its own experts.",
        )
        for metric in metrics
    )


_STATS = "agent_rl/rollout/metrics.py"
_AUDIT = "agent_rl/rollout/route_audit.py"
_FILTERS = "agent_rl/rollout/filters.py"
_RESCORE = "agent_rl/rollout/rescore.py"
_ADVANTAGES = "agent_rl/controller/advantages.py"
_BATCH = "agent_rl/controller/batch.py"
_HISTORY = "agent_rl/controller/async_rollout/ledger_file.py"
_GUARD = "agent_rl/controller/guard.py"
_TRAIN = "agent_rl/controller/train.py"
_STEP = "agent_rl/train/step_metrics.py"
_BALANCE = "agent_rl/train/expert_balancing/report.py"
_WORLD = "agent_rl/controller/rollout_runtime.py"
_GATEWAY = "agent_rl/endpoint/server.py"
_SYNC = "agent_rl/weight_sync/sync.py"
_PUBLISHER = "agent_rl/weight_sync/publisher.py"
_FLEET = "agent_rl/engine/fleet.py"

_LAGS = tuple(str(lag) for lag in range(MAX_STALENESS + 1))
_STOPS = tuple(reason.value for reason in StopReason if not reason.infrastructure)
_SPREAD = ("mean", "p10", "p50", "p90", "max")

_LOGPROBS = _of(
    _STEP,
    (
        "mismatch/k3_kl",
        "nats",
        "The k3 estimate of the KL from engine to trainer, the mean over sampled tokens of lag 0.",
    ),
    ("mismatch/f_tau_2", "share", "Sampled tokens whose probability differs by more than a factor of 2."),
    ("mismatch/token_mult_prob_error", "factor", "The mean factor by which a sampled token's probability differs."),
    ("mismatch/js_divergence", "nats", "The Jensen-Shannon divergence, estimated on the sampled tokens."),
    ("mismatch/logprob_abs_diff", "nats", "The mean distance of a sampled token's two log-probs."),
    ("mismatch/logprob_abs_diff_max", "nats", "The distance of the two log-probs of the worst token."),
)
_ROUTES = _of(
    _STEP,
    ("r3/router_mismatch", "share", "Routers, (token, MoE layer) pairs, where trainer and engine used other experts."),
    ("r3/router_mismatch_worst_layer", "share", "`router_mismatch` of the MoE layer where it is highest."),
    ("r3/token_mismatch", "share", "Tokens with a layer where trainer and engine used other experts."),
    (
        "r3/sequence_mismatch",
        "layers",
        "Differing layers of a token, the mean over sequences of each one's mean.",
    ),
)

METRICS: tuple[Metric, ...] = (
    *_of(
        _STATS,
        ("reward/mean", "reward", "The mean reward of the step's trajectories."),
        ("reward/std", "reward", "The standard deviation of the rewards of the step's trajectories."),
        ("reward/pass_rate", "share", "Trajectories that solved their task."),
        ("reward/groups_uniform", "share", "Groups whose rewards are all equal: they teach nothing within the group."),
        ("rollout/trajectories", "count", "Trajectories that the step collected."),
        ("rollout/groups_dropped", "count", "Tasks that were given up after their retry budget."),
        ("rollout/infrastructure_failures", "count", "Episodes that the infrastructure broke; they were run again."),
        ("rollout/suspected_hacks", "count", "Trajectories that changed test infrastructure; grading undid it."),
        ("rollout/parse_failures", "count", "Turns without a well-formed tool call."),
        (
            "rollout/retractions",
            "count",
            "How often engines put a running request back into their queue and computed its tokens again.",
        ),
        ("rollout/turns_mean", "turns", "The mean number of turns of a trajectory."),
        ("rollout/tokens_mean", "tokens", "The mean length of a trajectory."),
        ("rollout/sampled_tokens_mean", "tokens", "The mean number of tokens that a trajectory sampled."),
        ("rollout/tokens_per_second", "tokens/s", "All tokens of the trajectories run now over the rollout's time."),
        ("rollout/sampled_tokens_per_second", "tokens/s", "Their sampled tokens over the rollout's time."),
        ("time/rollout_recovered", "share", "Trajectories taken from the journal, whose time an earlier start spent."),
        ("rollout/generate_seconds_mean", "seconds", "The mean time that the engine took for a turn."),
        ("rollout/tool_seconds_mean", "seconds", "The mean time that the tool took in a turn."),
        ("rollout/grade_seconds_mean", "seconds", "The mean time that grading a trajectory took."),
    ),
    *_of(
        _STATS,
        ("harness/branches", "count", "The mean number of branches of a trajectory that an agent program drove."),
        ("harness/inflation", "ratio", "Tokens of all branches over those that differ: 1 where none is shared."),
        ("harness/rewrites", "count", "Requests whose conversation or tools were changed, so that a branch began."),
        ("harness/retries", "count", "Requests made again although their reply had been given."),
        ("harness/echo_differs", "count", "Replies that came back with other text or arguments than were given."),
    ),
    *_of(_GATEWAY, ("harness/failures", "count", "Agent programs that broke since the run was started last.")),
    Metric("rollout/stop/<reason>", "share", "Trajectories that ended for this reason.", _STATS, _STOPS),
    *_of(
        _FILTERS,
        ("filter/groups_drawn", "count", "Groups that ended, trained on or not."),
        ("filter/groups_discarded", "count", "Groups that dynamic sampling threw away."),
        ("filter/discarded_solved", "count", "Groups thrown away because every trajectory solved the task."),
        (
            "filter/discarded_unsolved",
            "count",
            "Groups thrown away because no trajectory solved the task.",
        ),
        ("filter/masked_trajectories", "count", "Trajectories that `train.filter` left out of the loss."),
        ("filter/masked_token_fraction", "share", "Sampled tokens that `train.filter` left out of the loss."),
        (
            "filter/length_ratio",
            "ratio",
            "The mean length trained on over the mean length sampled; away from 1, the filters bias lengths "
            "([why](old-logprobs.md#filters)).",
        ),
    ),
    Metric("filter/trained_tokens_<figure>", "tokens", "Sampled tokens of a trajectory trained on.", _FILTERS, _SPREAD),
    Metric(
        "filter/discarded_tokens_<figure>", "tokens", "Sampled tokens of a trajectory thrown away.", _FILTERS, _SPREAD
    ),
    *_of(
        _RESCORE,
        ("old_logprob/rescored", "count", "Trajectories that the engine evaluated again."),
        ("old_logprob/evaluations", "count", "Evaluations of each of them, n."),
        ("old_logprob/variance", "nats²", "The unbiased variance of a token's n evaluations, the mean over tokens."),
        ("old_logprob/variance_max", "nats²", "The same of the token where it is largest."),
        ("old_logprob/spread_fraction", "share", "Sampled tokens whose n evaluations differ at all."),
        ("old_logprob/rollout_abs_diff", "nats", "The mean distance of the mean of n from the log-prob sampled with."),
        ("old_logprob/rescore_seconds_mean", "seconds", "The mean time of all evaluations of a trajectory."),
    ),
    *_of(
        _BATCH,
        ("old_logprob/rescore_failed", "count", "Trajectories that the engine failed to evaluate; they are left out."),
        ("time/rescore_tail", "seconds", "The part of `time/rollout` after the last episode, which rescoring took."),
    ),
    *_of(
        _BATCH,
        ("goodput/tokens_per_second", "tokens/s", "Sampled tokens that the step trained on, over `time/step`."),
        ("goodput/fraction", "share", "The same over all tokens that its groups sampled, those discarded included."),
    ),
    *_of(
        "agent_rl/monitoring/loop_lag.py",
        ("loop/lag_p99_ms", "ms", "How late the controller's event loop woke in the step, the 99th percentile."),
    ),
    *_of(
        _TRAIN,
        ("time/step", "seconds", "The whole step, without its checkpoint and evaluation."),
        ("time/rollout", "seconds", "Waiting for the step's episodes, with their grading and rescoring."),
        ("async_rollout/trainer_idle", "share", "The share of the step in which the trainer waited for its batch."),
        ("async_rollout/buffered", "count", "Groups of later batches that had ended when the step took its own."),
        (
            "async_rollout/unfinished",
            "count",
            "Tasks of later batches that were drawn by then, those groups among them.",
        ),
        ("time/weight_sync", "seconds", "Sending the weights to the engines and checking them."),
        ("data/position", "count", "Tasks drawn since the run began; the next step goes on there."),
    ),
    *_of(
        "agent_rl/monitoring/metrics_log.py",
        ("time/ended", "seconds", "The Unix time at which the step ended."),
    ),
    *_of(
        "agent_rl/engine/generation_gate.py",
        (
            "async_rollout/interrupted_turns",
            "count",
            "Turns that weight updates cut in the step; they went on with the new weights.",
        ),
        ("async_rollout/reprefilled_tokens", "tokens", "The tokens before and in them, which were computed again."),
    ),
    *_of(
        "agent_rl/engine/sleep.py",
        ("time/engine_sleep", "seconds", "Letting the engines that share the trainer's GPUs sleep, before the update."),
        ("time/engine_wake", "seconds", "Giving them their memory back, a part of `time/weight_sync`."),
    ),
    *_of(
        "agent_rl/engine/utilization.py",
        (
            "engine/empty_fraction",
            "share",
            "Time since the last step ended in which an engine ran no request, the mean over engines.",
        ),
        (
            "engine/busy_fraction",
            "share",
            "Places for requests (`engine.max_running_requests`) that were taken, the mean over that time.",
        ),
    ),
    *_of(
        "agent_rl/controller/journal.py",
        ("recover/episodes", "count", "Episodes that ended in the step and went on from turns sampled before."),
        ("recover/turns", "count", "Their turns that were not sampled again (`rollout.recover: turns`)."),
        ("recover/differed", "count", "Episodes begun anew, since a tool called again answered otherwise."),
        ("recover/too_old", "count", "Episodes begun anew, since older weights than their batch allows had sampled."),
    ),
    *_of(
        _HISTORY,
        ("ledger/trained", "count", "Positions of the data whose groups the run's steps have trained on."),
        ("ledger/discarded", "count", "Positions whose groups dynamic sampling threw away."),
        ("ledger/dropped", "count", "Positions that were given up after their retry budget."),
        ("ledger/left_out", "count", "Positions whose task cannot be graded."),
    ),
    *_of(
        _WORLD,
        ("nodes/alive", "count", "Sandbox hosts that take sandboxes (`sandbox.placement: ray`)."),
        ("nodes/lost", "count", "Sandbox hosts that were lost since the run was started last."),
        ("nodes/sandboxes", "count", "Sandboxes on all hosts as the step ends."),
    ),
    *_of(
        _STEP,
        ("time/old_logprob", "seconds", "The pass that takes the old log-probs, on the slowest rank."),
        ("time/logprob_without_replay", "seconds", "The pass without replay, on the slowest rank."),
        ("time/reference_logprob", "seconds", "The reference model's pass, on the slowest rank."),
        ("time/update", "seconds", "All optimizer updates of the step, on the slowest rank."),
    ),
    *_of(
        _ADVANTAGES,
        ("train/samples", "count", "Trajectories that the step trained on."),
        ("train/zero_variance_groups", "count", "Groups left out because their advantages are all 0."),
        (
            "train/overlong_penalty",
            "reward",
            "What `train.overlong` took from a trajectory's reward, the mean over trajectories.",
        ),
        ("r3/dropped_samples", "count", "Trajectories left out for want of routes (`r3.missing: drop_sample`)."),
    ),
    *_of(
        _STEP,
        ("train/sampled_tokens", "tokens", "Sampled tokens of the step's updates together."),
        ("train/updates", "count", "Optimizer updates that changed the weights."),
        ("train/skipped_updates", "count", "Updates left out, as not finite or as a spike ([guard](guard.md))."),
        ("train/spikes", "count", "Updates whose gradient norm was beyond `guard.spike_factor` x its median so far."),
        ("train/loss", "loss", "The loss of the global batch, the mean over the step's finite updates."),
        ("train/grad_norm", "norm", "The gradient norm before clipping, the mean over the step's finite updates."),
        ("train/lr", "rate", "The learning rate of the step's last finite update."),
        ("train/clip_fraction", "share", "Sampled tokens whose gradient, or for cispo whose weight, the clip cut."),
        ("train/approx_kl", "nats", "The k3 estimate of the KL from the old log-probs to the policy in the update."),
        ("train/entropy", "nats", "The mean entropy of the distributions that the sampled tokens were drawn from."),
        ("train/correction_weight", "factor", "The mean weight that `train.correction` gave a sampled token."),
        ("train/correction_dropped", "share", "Sampled tokens that `train.correction` gave the weight 0."),
        ("train/kl_reference", "nats", "The KL to the reference model by `train.kl.estimator`, the mean over tokens."),
        ("train/kl_penalty", "reward", "What a KL in the reward took from an advantage, the mean over tokens."),
    ),
    *_of(
        _STEP,
        ("staleness/mean", "updates", "How many updates before this step a sampled token's weights lie, the mean."),
        ("staleness/max", "updates", "The same of the oldest token, at most `async_rollout.max_staleness`."),
    ),
    Metric("staleness/share_<lag>", "share", "Sampled tokens of this lag.", _STEP, _LAGS),
    Metric(
        "off_policy/k3_kl_lag_<lag>",
        "nats",
        "The k3 estimate of the KL from the weights that sampled to those before the step, over tokens of this lag.",
        _STEP,
        _LAGS[1:],
    ),
    Metric(
        "off_policy/ratio_mean_lag_<lag>",
        "factor",
        "The mean of a token's probability under the weights before the step over that it was sampled with.",
        _STEP,
        _LAGS[1:],
    ),
    Metric(
        "off_policy/clip_fraction_lag_<lag>",
        "share",
        "Tokens of this lag for which that ratio is beyond the objective's clip before any update.",
        _STEP,
        _LAGS[1:],
    ),
    *_LOGPROBS,
    *_without_replay((*_LOGPROBS, *_ROUTES)),
    *_ROUTES,
    Metric(
        "r3/missing_token_fraction",
        "share",
        "Tokens that the engine sent no routes of; `r3.missing_budget` bounds it.",
        _STATS,
    ),
    Metric(
        "r3/recomputed_token_fraction",
        "share",
        "Sampled tokens of requests that were retracted, whose routes a prefill may have computed again.",
        _STATS,
    ),
    *_of(
        _AUDIT,
        ("r3/audit_trajectories", "count", "Trajectories whose routes were asked for again (`r3.audit`)."),
        (
            "r3/audit_mismatch",
            "share",
            "Their (token, layer) sets that a prefill of the same tokens computes otherwise; rounding alone gives some "
            "([what it can see](routing.md#audit)).",
        ),
        (
            "r3/audit_cached_mismatch",
            "share",
            "Their sets that came out of the prefix cache otherwise; 0, but for rows of siblings.",
        ),
    ),
    *_of(
        _STEP,
        ("r3/coverage", "share", "Route rows that were present when the trainer replayed them."),
        ("r3/fallback_token_fraction", "share", "Tokens that took the trainer's own routes for want of a row."),
        ("r3/bytes_per_token", "bytes", "The size of the routing tensor for one token."),
    ),
    *_of(
        _BALANCE,
        (
            "balance/imbalance_before_mean",
            "ratio",
            "The fullest expert rank's tokens over the mean, with every token at its expert's home; the mean over "
            "layers and micro-batches.",
        ),
        ("balance/imbalance_before_p95", "ratio", "The same; the 95th percentile."),
        ("balance/imbalance_after_mean", "ratio", "The same as planned; the mean."),
        ("balance/imbalance_after_p95", "ratio", "The same as planned; the 95th percentile."),
        ("balance/link_before", "tokens", "Tokens over the fullest link between machines, all at home; the mean."),
        ("balance/link_after", "tokens", "The same as planned."),
        ("balance/unforeseen_fraction", "share", "Tokens of balanced passes that had no routes to plan by."),
        ("balance/bytes_fetched", "bytes", "Weights of borrowed experts that reached their borrowers, of all ranks."),
        ("balance/bytes_returned", "bytes", "Gradients of borrowed experts that went home, of all ranks."),
        ("balance/planning_ms", "ms", "Processor time that a rank spent counting and planning, of the slowest."),
        ("balance/planning_exposed_ms", "ms", "Time that the passes waited for plans, on the slowest rank."),
        ("balance/exposed_transfer_ms", "ms", "Time that the passes waited for experts, on the slowest rank."),
        ("balance/pool_refresh_ms", "ms", "Time that copying changed weights into the pool took, on the slowest rank."),
    ),
    *_of(
        _SYNC,
        (
            "weight_sync/logprob_abs_diff",
            "nats",
            "The mean distance of engine and trainer on a fixed sequence after the update, of the worst engine.",
        ),
        ("weight_sync/bytes", "bytes", "What was sent to every engine."),
        ("weight_sync/engines", "count", "Engines in use after the update."),
        ("weight_sync/verified", "share", "Engines whose checksums were compared with those of what was sent."),
        ("weight_sync/retries", "count", "Further ways that were tried with engines that did not take the update."),
        ("weight_sync/disk_loads", "count", "Engines that read the weights from disk."),
        (
            "weight_sync/stale_caches",
            "count",
            "Engines that kept old prefixes (`engine.pause_mode: in_place`).",
        ),
    ),
    *_of(
        _PUBLISHER,
        ("weight_sync/join_seconds", "seconds", "Forming the process group with the engines, where one was formed."),
        ("weight_sync/pause_seconds", "seconds", "Pausing the engines, beyond preparing the first bucket."),
        ("weight_sync/prepare_seconds", "seconds", "Gathering and converting the weights."),
        ("weight_sync/broadcast_seconds", "seconds", "Broadcasting the weights, beyond preparing the next bucket."),
        ("weight_sync/load_seconds", "seconds", "The engines' loading of the last bucket."),
        ("weight_sync/check_seconds", "seconds", "Comparing the checksums."),
    ),
    *_of(
        _FLEET,
        ("engines/serving", "count", "Engines that serve at the step's end."),
        ("engines/joins", "count", "Engines that came up or came back during the step, and serve."),
        (
            "engines/suspected",
            "count",
            "Times in the step that an engine did not answer and was kept from new requests.",
        ),
        ("engines/deaths", "count", "Times in the step that an engine died or did not come up."),
        ("engines/stale", "count", "Times in the step that an engine was found with weights other than the published."),
        ("engines/retired", "count", "Engines that were put out of use for good in the step."),
    ),
    *_of(
        _GUARD,
        ("guard/crossed", "count", "Limits of the guard that the step is beyond."),
        ("guard/streak", "steps", "The longest number of steps in a row that one of them has been crossed."),
    ),
)
"""All metrics, in the order in which docs/metrics.md shows their groups, and those of one group."""

NAMES = frozenset(name for metric in METRICS for name in metric.names)


def check_registered(names: Iterable[str]) -> None:
    """Raises AgentRlError for the first of ``names`` that is not registered."""
    for name in names:
        if name not in NAMES:
            raise AgentRlError(f"metric {name!r} is not registered: add it to agent_rl/monitoring/metrics.py")


_BEGIN, _END = "<!-- tables from agent_rl/monitoring/metrics.py: begin -->\n", "<!-- tables: end -->\n"


def with_tables(page: str) -> str:
    """``page`` with the registry's tables between its two markers, in place of what is there."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{_tables()}{_END}{after}"


def _tables() -> str:
    groups = dict.fromkeys(metric.group for metric in METRICS)
    return "\n".join(_table(group, [metric for metric in METRICS if metric.group == group]) for group in groups)


def _table(group: str, metrics: Iterable[Metric]) -> str:
    rows = [f"| `{metric.name}` | {metric.unit} | {_explained(metric)} | `{metric.source}` |" for metric in metrics]
    return "\n".join([f"## {group}", "| name | unit | what it is | made in |", "|---|---|---|---|", *rows, ""])


def _explained(metric: Metric) -> str:
    if not metric.values:
        return metric.text
    placeholder = metric.name[metric.name.index("<") : metric.name.index(">") + 1]
    return f"{metric.text} `{placeholder}`: {', '.join(metric.values)}."


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        path = Path(argument)
        path.write_text(with_tables(path.read_text()))
