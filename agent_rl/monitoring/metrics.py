"""The registry of all metrics: name, unit, description and source file.

:class:`agent_rl.monitoring.metrics_log.MetricsLog` rejects metrics that are not registered here. ``python -m
scripts.make_reference`` writes the tables of docs/reference/metrics.md from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from agent_rl.config import MAX_STALENESS
from agent_rl.errors import AgentRlError
from agent_rl.types import StopReason


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the registry. ``name`` may contain one ``<placeholder>`` for ``values``.

    A source of a run (``train.sources``) is any value of ``<source>``; an environment names each ``<part>`` of a reward
    and each ``<metric>``.
    ``text`` is a one-sentence description; ``source`` is the file that computes the metric.
    """

    name: str
    unit: str
    text: str
    source: str
    values: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """The part of the name before the first slash."""
        return self.name.partition("/")[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names that this row registers."""
        return tuple(re.sub("<.*>", value, self.name) for value in self.values) or (self.name,)


def _rows(source: str, *rows: tuple[str, str, str]) -> tuple[Metric, ...]:
    return tuple(Metric(name, unit, text, source) for name, unit, text in rows)


def _without_replay(metrics: Iterable[Metric]) -> tuple[Metric, ...]:
    return tuple(
        replace(
            metric,
            name=f"mismatch_without_replay/{metric.name.partition('/')[2]}",
            text=f"`{metric.name}` without routing replay: the trainer's routers select the experts.",
        )
        for metric in metrics
    )


_ROLLOUT = "agent_rl/rollout/metrics.py"
_ROUTE_AUDIT = "agent_rl/rollout/route_audit.py"
_FILTERS = "agent_rl/rollout/filters.py"
_RESCORE = "agent_rl/rollout/rescore.py"
_ADVANTAGES = "agent_rl/controller/advantages.py"
_BATCH = "agent_rl/controller/batch.py"
_LEDGER = "agent_rl/controller/async_rollout/task_ledger.py"
_GUARD = "agent_rl/controller/guard.py"
_TEACHER = "agent_rl/controller/teacher.py"
_TRAIN_LOOP = "agent_rl/controller/train.py"
_STEP = "agent_rl/train/step_metrics.py"
_BALANCE = "agent_rl/train/expert_balancing/report.py"
_ROLLOUT_RUNTIME = "agent_rl/controller/rollout_runtime.py"
_ENDPOINT = "agent_rl/endpoint/server.py"
_SYNC = "agent_rl/weight_sync/sync.py"
_PUBLISHER = "agent_rl/weight_sync/publisher.py"
_ENGINES = "agent_rl/engine/fleet.py"

_LAGS = tuple(str(lag) for lag in range(MAX_STALENESS + 1))
_STOP_REASONS = tuple(reason.value for reason in StopReason if not reason.infrastructure)
_QUANTILES = ("mean", "p10", "p50", "p90", "max")

_LOGPROBS = _rows(
    _STEP,
    ("mismatch/k3_kl", "nats", "k3 estimate of the KL from engine to trainer; mean over sampled tokens of lag 0."),
    ("mismatch/f_tau_2", "share", "Sampled tokens whose probabilities differ by a factor above 2."),
    ("mismatch/token_mult_prob_error", "factor", "Factor between a sampled token's probabilities; mean over tokens."),
    ("mismatch/js_divergence", "nats", "Jensen-Shannon divergence between engine and trainer on the sampled tokens."),
    ("mismatch/logprob_abs_diff", "nats", "Absolute difference of a sampled token's two log-probs; mean over tokens."),
    ("mismatch/logprob_abs_diff_max", "nats", "Absolute difference of a sampled token's log-probs; maximum."),
)
_ROUTES = _rows(
    _STEP,
    ("r3/router_mismatch", "share", "Pairs (token, MoE layer) whose experts differ between trainer and engine."),
    ("r3/router_mismatch_worst_layer", "share", "`r3/router_mismatch` of the MoE layer with the highest value."),
    ("r3/token_mismatch", "share", "Tokens whose experts differ between trainer and engine in at least one MoE layer."),
    (
        "r3/sequence_mismatch",
        "layers",
        "MoE layers with different experts per token; mean over each sequence, then over sequences.",
    ),
)

METRICS: tuple[Metric, ...] = (
    *_rows(
        _ROLLOUT,
        ("reward/mean", "reward", "Mean reward of the step's trajectories."),
        ("reward/std", "reward", "Standard deviation of the rewards of the step's trajectories."),
        ("reward/pass_rate", "share", "Trajectories that solved their task."),
        ("reward/groups_uniform", "share", "Groups whose rewards are all equal: no advantage within the group."),
        ("reward/<part>", "reward", "Mean of a part of the reward that the environment names."),
        ("env/<metric>", "env", "Mean of a metric that the environment names; not trained on."),
        ("source/<source>/groups", "count", "Groups of a source (`train.sources`) in the step."),
        ("source/<source>/reward", "reward", "Mean reward of the source's trajectories."),
        ("source/<source>/reward/<part>", "reward", "`reward/<part>` of the source's trajectories."),
        ("source/<source>/env/<metric>", "env", "`env/<metric>` of the source's trajectories."),
        ("source/<source>/pass_rate", "share", "Trajectories of the source that solved their task."),
        ("source/<source>/turns_mean", "count", "Turns per trajectory of the source."),
        ("source/<source>/tokens_mean", "tokens", "Tokens per trajectory of the source, observations included."),
        ("rollout/trajectories", "count", "Trajectories collected in the step."),
        ("rollout/groups_dropped", "count", "Tasks dropped after their retry budget."),
        ("rollout/infrastructure_failures", "count", "Episodes run again after an infrastructure failure."),
        ("rollout/suspected_hacks", "count", "Trajectories that changed the test infrastructure; grading restored it."),
        ("rollout/parse_failures", "count", "Turns without a well-formed tool call."),
        ("rollout/retractions", "count", "Times that engines requeued a running request and recomputed its tokens."),
        ("rollout/turns_mean", "turns", "Mean turns per trajectory."),
        ("rollout/tokens_mean", "tokens", "Mean tokens per trajectory."),
        ("rollout/branch_tokens_mean", "tokens", "Mean tokens per branch of a trajectory."),
        ("rollout/compactions", "count", "Mean summaries per trajectory (`rollout.compaction`)."),
        ("rollout/subagents", "count", "Mean sub-agents per trajectory (`rollout.subagents`)."),
        ("rollout/summary_tokens_mean", "tokens", "Mean sampled tokens per summary; 0 without summaries."),
        ("rollout/sampled_tokens_mean", "tokens", "Mean sampled tokens per trajectory."),
        (
            "rollout/kept_tokens",
            "tokens",
            "Mean number of tokens from which a token was drawn, with `rollout.top_p`, `top_k` or `min_p`.",
        ),
        ("rollout/thinking_tokens", "tokens", "Mean sampled tokens of thoughts and their end markers per trajectory."),
        ("rollout/thinking_truncated", "share", "Turns whose thoughts were closed at `rollout.max_thinking_tokens`."),
        ("rollout/tokens_per_second", "tokens/s", "Tokens of trajectories run in this process over the rollout time."),
        ("rollout/sampled_tokens_per_second", "tokens/s", "Sampled tokens of these trajectories per rollout second."),
        (
            "time/rollout_recovered",
            "share",
            "Trajectories read from the journal of an earlier start; their time is not in `time/rollout`.",
        ),
        ("rollout/generate_seconds_mean", "seconds", "Mean generation time per turn."),
        ("rollout/tool_seconds_mean", "seconds", "Mean tool time per turn."),
        ("rollout/grade_seconds_mean", "seconds", "Mean grading time per trajectory."),
        ("grading/mutant_seconds", "seconds", "Mean time of the negative control per success that has one."),
    ),
    *_rows(
        _ROLLOUT,
        ("harness/branches", "count", "Mean branches per trajectory of an agent program."),
        ("harness/inflation", "ratio", "Tokens of all branches over distinct tokens; 1 if no token is shared."),
        (
            "harness/left_out_token_fraction",
            "share",
            "Sampled tokens that a rule of `rollout.harness.train_if` leaves out of training.",
        ),
        ("harness/rewrites", "count", "Requests that changed the conversation or the tools and started a new branch."),
        ("harness/retries", "count", "Requests repeated after their response had been sent."),
        ("harness/echo_differs", "count", "Responses that the program sent back with changed text or arguments."),
    ),
    *_rows(_ENDPOINT, ("harness/failures", "count", "Failures of agent programs since the last start of the run.")),
    Metric("rollout/stop/<reason>", "share", "Trajectories that ended for this reason.", _ROLLOUT, _STOP_REASONS),
    *_rows(
        _FILTERS,
        ("filter/groups_drawn", "count", "Groups that finished, trained on or not."),
        ("filter/groups_discarded", "count", "Groups discarded by dynamic sampling."),
        ("filter/discarded_solved", "count", "Groups discarded because all trajectories solved the task."),
        ("filter/discarded_unsolved", "count", "Groups discarded because no trajectory solved the task."),
        ("filter/masked_trajectories", "count", "Trajectories masked from the loss by `train.filter`."),
        ("filter/masked_token_fraction", "share", "Sampled tokens masked from the loss by `train.filter`."),
        (
            "filter/length_ratio",
            "ratio",
            "Mean length of trained trajectories over mean length of sampled trajectories; a value other than 1 shows "
            "a length bias of the filters (docs/reference/objectives.md).",
        ),
    ),
    Metric("filter/trained_tokens_<figure>", "tokens", "Sampled tokens per trained trajectory.", _FILTERS, _QUANTILES),
    Metric(
        "filter/discarded_tokens_<figure>", "tokens", "Sampled tokens per discarded trajectory.", _FILTERS, _QUANTILES
    ),
    *_rows(
        _RESCORE,
        ("old_logprob/rescored", "count", "Trajectories evaluated again by the engine."),
        ("old_logprob/evaluations", "count", "Evaluations per trajectory (n)."),
        ("old_logprob/variance", "nats²", "Unbiased variance of a token's n evaluations; mean over tokens."),
        ("old_logprob/variance_max", "nats²", "Unbiased variance of a token's n evaluations; maximum over tokens."),
        ("old_logprob/spread_fraction", "share", "Sampled tokens whose n evaluations are not all equal."),
        (
            "old_logprob/rollout_abs_diff",
            "nats",
            "Absolute difference of a token's mean evaluation and its sampled log-prob; mean over tokens.",
        ),
        ("old_logprob/rescore_seconds_mean", "seconds", "Mean time of all evaluations of a trajectory."),
    ),
    *_rows(
        _STEP,
        (
            "distill/kl",
            "nats",
            "Reverse KL to the teacher before the update; mean over tokens.",
        ),
        (
            "distill/loss_kl",
            "nats",
            "Reverse KL to the teacher over its `top_k` tokens and the rest, as in the loss; mean over tokens.",
        ),
    ),
    *_rows(_TEACHER, ("distill/score_seconds_mean", "seconds", "Mean time of the teacher to evaluate a trajectory.")),
    *_rows(
        _BATCH,
        ("old_logprob/rescore_failed", "count", "Trajectories excluded because the engine failed to evaluate them."),
        ("time/rescore_tail", "seconds", "Part of `time/rollout` after the last episode, spent on rescoring."),
    ),
    *_rows(
        _BATCH,
        ("goodput/tokens_per_second", "tokens/s", "Sampled tokens trained on in the step over `time/step`."),
        (
            "goodput/fraction",
            "share",
            "Sampled tokens trained on over all tokens sampled for the step, discarded groups included.",
        ),
    ),
    *_rows(
        "agent_rl/utils/concurrency.py",
        ("loop/lag_p99_ms", "ms", "Delay of the controller's event loop in the step; 99th percentile."),
    ),
    *_rows(
        _TRAIN_LOOP,
        ("time/step", "seconds", "Duration of the step, without checkpoint and evaluation."),
        ("time/rollout", "seconds", "Time spent waiting for the step's episodes, including grading and rescoring."),
        ("async_rollout/trainer_idle", "share", "Share of the step in which the trainer waited for its batch."),
        ("async_rollout/buffered", "count", "Finished groups of later batches when the step took its batch."),
        ("async_rollout/unfinished", "count", "Tasks of later batches drawn by then, finished groups included."),
        ("time/weight_sync", "seconds", "Time to send the weights to the engines and verify them."),
        ("data/position", "count", "Tasks drawn since the run began; the next step continues from here."),
    ),
    *_rows(
        "agent_rl/controller/task_order.py",
        ("curriculum/tasks_seen", "count", "Tasks with a solve rate (`train.curriculum`)."),
        ("curriculum/solve_rate_mean", "share", "Latest solve rate of a task; mean over the tasks seen."),
    ),
    *_rows("agent_rl/monitoring/metrics_log.py", ("time/ended", "seconds", "Unix time at the end of the step.")),
    *_rows(
        "agent_rl/engine/generation_gate.py",
        (
            "async_rollout/interrupted_turns",
            "count",
            "Turns interrupted by weight updates in the step and continued with the new weights.",
        ),
        ("async_rollout/reprefilled_tokens", "tokens", "Tokens recomputed to continue these turns."),
    ),
    *_rows(
        "agent_rl/engine/sleep.py",
        ("time/engine_sleep", "seconds", "Time until colocated engines sleep, before the update."),
        ("time/engine_wake", "seconds", "Time to restore the memory of colocated engines; part of `time/weight_sync`."),
    ),
    *_rows(
        "agent_rl/engine/utilization.py",
        ("engine/empty_fraction", "share", "Share of time since the last step without a running request; engine mean."),
        ("engine/busy_fraction", "share", "Occupied share of `engine.max_running_requests`; mean of time and engines."),
    ),
    *_rows(
        "agent_rl/controller/journal.py",
        ("recover/episodes", "count", "Episodes that finished in the step after resuming from earlier turns."),
        ("recover/turns", "count", "Turns of these episodes that were reused (`rollout.recover: turns`)."),
        ("recover/differed", "count", "Episodes restarted because a repeated tool call gave a different result."),
        ("recover/too_old", "count", "Episodes restarted because their tokens were older than the batch allows."),
    ),
    *_rows(
        _LEDGER,
        ("ledger/trained", "count", "Data positions whose groups were trained on since the run began."),
        ("ledger/discarded", "count", "Data positions whose groups dynamic sampling discarded."),
        ("ledger/dropped", "count", "Data positions dropped after their retry budget."),
        ("ledger/left_out", "count", "Data positions whose task cannot be graded."),
    ),
    *_rows(
        _ROLLOUT_RUNTIME,
        ("nodes/alive", "count", "Nodes that accept sandboxes (`sandbox.placement: ray`)."),
        ("nodes/lost", "count", "Sandbox nodes lost since the last start of the run."),
        ("nodes/sandboxes", "count", "Sandboxes on all nodes at the end of the step."),
    ),
    *_rows(
        _STEP,
        ("time/old_logprob", "seconds", "Duration of the old log-prob pass on the slowest rank."),
        ("time/logprob_without_replay", "seconds", "Duration of the pass without replay on the slowest rank."),
        ("time/reference_logprob", "seconds", "Duration of the reference model's pass on the slowest rank."),
        ("time/update", "seconds", "Duration of all optimizer updates of the step on the slowest rank."),
    ),
    *_rows(
        _ADVANTAGES,
        ("train/samples", "count", "Trajectories trained on in the step."),
        ("train/zero_variance_groups", "count", "Groups excluded because all their advantages are 0."),
        ("train/turn_reward_mean", "reward", "Reward of a turn (`train.turn_rewards`); mean over turns."),
        ("train/overlong_penalty", "reward", "Penalty subtracted by `train.overlong`; mean over trajectories."),
        ("r3/dropped_samples", "count", "Trajectories dropped because routes are missing (`r3.missing: drop_sample`)."),
    ),
    *_rows(
        _STEP,
        (
            "train/router_shift_mean",
            "ratio",
            "Router-shift ratio (`correction.router_shift`); mean over tokens.",
        ),
        ("train/observation_loss", "nats", "Cross entropy of observations (`train.echo`); mean over their tokens."),
        ("train/sampled_tokens", "tokens", "Sampled tokens that the loss counts, in all updates of the step."),
        ("train/updates", "count", "Optimizer updates applied."),
        ("train/skipped_updates", "count", "Updates skipped as not finite or as a spike (docs/how-to/debug-a-run.md)."),
        ("train/spikes", "count", "Updates with a gradient norm above `guard.spike_factor` times the median."),
        ("train/loss", "loss", "Loss of the global batch; mean over finite updates."),
        ("train/grad_norm", "norm", "Gradient norm before clipping; mean over finite updates."),
        ("train/lr", "rate", "Learning rate of the last finite update."),
        ("train/clip_fraction", "share", "Sampled tokens whose gradient was clipped (for cispo: their weight)."),
        ("train/approx_kl", "nats", "k3 estimate of the KL from the old log-probs to the policy during the update."),
        ("train/entropy", "nats", "Entropy of the distributions of the sampled tokens; mean over tokens."),
        ("train/correction_weight", "factor", "Weight from `train.correction`; mean over sampled tokens."),
        ("train/correction_dropped", "share", "Sampled tokens with weight 0 from `train.correction`."),
        ("train/kl_reference", "nats", "KL to the reference model by `train.kl.estimator`; mean over tokens."),
        ("train/kl_penalty", "reward", "KL penalty subtracted from the advantage; mean over tokens."),
    ),
    *_rows(
        _STEP,
        ("critic/value_mean", "reward", "Value before the update; mean over steps of GAE (`train.baseline: critic`)."),
        ("critic/return_mean", "reward", "Return that the values learn; mean over steps of GAE."),
        ("critic/explained_variance", "share", "1 - Var(return - value) / Var(return), before the update."),
        ("critic/loss", "loss", "Value loss of the global batch; mean over updates."),
        ("critic/clip_fraction", "share", "Steps of GAE whose value loss was clipped (`train.critic.clip`)."),
        ("critic/grad_norm", "norm", "Gradient norm of the value head; mean over updates."),
        ("critic/warmup", "flag", "1 if only the value head learned (`train.critic.warmup_steps`)."),
    ),
    *_rows(_STEP, ("sft/loss", "nats", "Negative log-likelihood of a trained token of `agent-rl sft`; weighted mean.")),
    *_rows(
        "agent_rl/controller/sft.py",
        ("sft/epoch", "epochs", "Rows trained since the run began over the rows of an epoch."),
        ("sft/validation_loss", "nats", "`sft/loss` on the held-out rows after the step."),
        ("sft/validation_perplexity", "factor", "Exponential of `sft/validation_loss`."),
        ("time/validation", "seconds", "Duration of the pass over the held-out rows."),
    ),
    *_rows(
        _STEP,
        ("staleness/mean", "updates", "Age of a sampled token's weights in updates before this step; mean."),
        ("staleness/max", "updates", "Age of the oldest sampled token; at most `async_rollout.max_staleness`."),
    ),
    Metric("staleness/share_<lag>", "share", "Sampled tokens of this lag.", _STEP, _LAGS),
    Metric(
        "off_policy/k3_kl_lag_<lag>",
        "nats",
        "k3 estimate of the KL from the sampling weights to the weights before the step, over tokens of this lag.",
        _STEP,
        _LAGS[1:],
    ),
    Metric(
        "off_policy/ratio_mean_lag_<lag>",
        "factor",
        "Probability under the weights before the step over the sampling probability; mean over tokens of this lag.",
        _STEP,
        _LAGS[1:],
    ),
    Metric(
        "off_policy/clip_fraction_lag_<lag>",
        "share",
        "Tokens of this lag beyond the objective's clip before the first update, by what it clips; not for gspo.",
        _STEP,
        _LAGS[1:],
    ),
    *_LOGPROBS,
    *_without_replay((*_LOGPROBS, *_ROUTES)),
    *_ROUTES,
    Metric("r3/missing_token_fraction", "share", "Tokens without routes; limited by `r3.missing_budget`.", _ROLLOUT),
    Metric(
        "r3/recomputed_token_fraction",
        "share",
        "Sampled tokens of retracted requests, whose routes a prefill may have recomputed.",
        _ROLLOUT,
    ),
    *_rows(
        _ROUTE_AUDIT,
        ("r3/audit_trajectories", "count", "Trajectories whose routes were requested a second time (`r3.audit`)."),
        (
            "r3/audit_mismatch",
            "share",
            "Expert sets ((token, layer) pairs) that a second prefill computed differently; rounding alone causes "
            "some (docs/explanation/routing-replay.md).",
        ),
        (
            "r3/audit_cached_mismatch",
            "share",
            "Expert sets from the prefix cache that differ; 0 except for rows computed by sibling episodes.",
        ),
    ),
    *_rows(
        _STEP,
        ("r3/coverage", "share", "Rows of routes present when the trainer replayed them."),
        ("r3/fallback_token_fraction", "share", "Tokens routed by the trainer's router because their row was missing."),
        ("r3/bytes_per_token", "bytes", "Size of the routing tensor per token."),
    ),
    *_rows(
        _BALANCE,
        (
            "balance/imbalance_before_mean",
            "ratio",
            "Tokens of the busiest expert rank over the mean, without borrowing; mean over layers and micro-batches.",
        ),
        ("balance/imbalance_before_p95", "ratio", "`balance/imbalance_before_mean` as the 95th percentile."),
        ("balance/imbalance_after_mean", "ratio", "Tokens of the busiest expert rank over the mean, as planned; mean."),
        ("balance/imbalance_after_p95", "ratio", "`balance/imbalance_after_mean` as the 95th percentile."),
        ("balance/link_before", "tokens", "Tokens over the busiest node's link, without borrowing; mean."),
        ("balance/link_after", "tokens", "Tokens over the busiest node's link, as planned; mean."),
        ("balance/unforeseen_fraction", "share", "Tokens of balanced passes without known routes."),
        ("balance/bytes_fetched", "bytes", "Weights of borrowed experts received by their borrowers; sum over ranks."),
        ("balance/bytes_returned", "bytes", "Gradients of borrowed experts returned to their home ranks, all ranks."),
        ("balance/planning_ms", "ms", "CPU time for counting and planning on the slowest rank."),
        ("balance/planning_exposed_ms", "ms", "Time that passes waited for plans on the slowest rank."),
        ("balance/exposed_transfer_ms", "ms", "Time that passes waited for experts on the slowest rank."),
        ("balance/pool_refresh_ms", "ms", "Time to copy updated weights into the pool on the slowest rank."),
        ("balance/bytes_moved", "bytes", "State of experts that moved to other home ranks, received by all ranks."),
        ("balance/placement_ms", "ms", "Time that the step waited for experts to move, on the slowest rank."),
    ),
    *_rows(
        _SYNC,
        (
            "weight_sync/logprob_abs_diff",
            "nats",
            "Absolute log-prob difference between engine and trainer on a fixed sequence after the update; mean over "
            "tokens, worst engine.",
        ),
        (
            "weight_sync/logprob_limit",
            "nats",
            "The difference from which on an engine is refused, derived from that of the first update.",
        ),
        ("weight_sync/bytes", "bytes", "Bytes sent to each engine."),
        (
            "weight_sync/delta_ratio",
            "share",
            "`weight_sync/bytes` over the bytes of all weights (`engine.weight_sync: delta`).",
        ),
        ("weight_sync/engines", "count", "Engines in use after the update."),
        ("weight_sync/verified", "share", "Engines whose checksums were compared with those of the sent weights."),
        ("weight_sync/retries", "count", "Other transfer methods tried after an engine did not accept the update."),
        ("weight_sync/disk_loads", "count", "Engines that loaded the weights from disk."),
        ("weight_sync/stale_caches", "count", "Engines with prefixes of old weights (`engine.pause_mode: in_place`)."),
    ),
    *_rows(
        _PUBLISHER,
        ("weight_sync/join_seconds", "seconds", "Time to form the process group with the engines, if one was formed."),
        ("weight_sync/pause_seconds", "seconds", "Time to pause the engines, minus that to prepare the first bucket."),
        ("weight_sync/stage_seconds", "seconds", "Time to send and prove a delta while the engines sample."),
        ("weight_sync/check_seconds", "seconds", "Time to compare the checksums."),
    ),
    *_rows(
        "agent_rl/weight_sync/bucket_sender.py",
        ("weight_sync/prepare_seconds", "seconds", "Time to gather and convert the weights."),
        ("weight_sync/broadcast_seconds", "seconds", "Time to broadcast the weights, minus preparing the next bucket."),
        ("weight_sync/load_seconds", "seconds", "Time for the engines to load the last bucket."),
    ),
    *_rows(
        _ENGINES,
        ("engines/serving", "count", "Engines that serve at the end of the step."),
        ("engines/joins", "count", "Engines that started or returned in the step and serve."),
        ("engines/suspected", "count", "Times in the step that an engine did not respond and got no new requests."),
        ("engines/deaths", "count", "Times in the step that an engine died or failed to start."),
        ("engines/stale", "count", "Times in the step that an engine had other weights than the published ones."),
        ("engines/retired", "count", "Engines removed permanently in the step."),
    ),
    *_rows(
        _GUARD,
        ("guard/crossed", "count", "Guard limits violated in the step."),
        ("guard/streak", "steps", "Consecutive steps of the longest current violation of a guard limit."),
    ),
)
"""All metrics, in the order of docs/reference/metrics.md."""

NAMES = frozenset(name for metric in METRICS for name in metric.names)
_NAMED = (
    (re.compile("^source/[^/]+"), "source/<source>"),
    (re.compile("(^|/)reward/[^/]+$"), r"\1reward/<part>"),
    (re.compile("(^|/)env/[^/]+$"), r"\1env/<metric>"),
)
"""Which names of a run are which placeholder."""


def check_registered(names: Iterable[str]) -> None:
    """Raises AgentRlError if a name is not registered."""
    for name in names:
        general = name
        for pattern, placeholder in _NAMED:
            general = general if general in NAMES else pattern.sub(placeholder, general)
        if general not in NAMES:
            raise AgentRlError(f"metric {name!r} is not registered: add it to agent_rl/monitoring/metrics.py")
