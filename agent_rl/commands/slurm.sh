# Ray's head and workers, and the run, are job steps of their own. What Slurm does, each rule observed with 22.05:
# - A preemption sends TERM to the steps only. A script that then ends with 143 is FAILED and never requeued, so this
#   one requeues itself.
# - scancel, scontrol requeue and the time limit send TERM to this script too; then Slurm decides what follows.
# - USR1 arrives before the time limit (--signal): the run stops, and the script requeues itself.
# - `kill -TERM` of an srun kills its step at once. `scancel --signal=TERM JOB.STEP` lets the step clean up.
set -euo pipefail
say() { echo "$(date '+%F %T') job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)): $*"; }
step() { local node=$1; shift; srun --overlap --nodes=1 --ntasks=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" -w "$node" "$@"; }
address() { scontrol show node -o "$1" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2; }  # names of nodes need not resolve

stop_run() {
  local id
  id=$(squeue -h -s -j "$SLURM_JOB_ID" -o '%i %j' | awk '$2 == "run" { print $1 }')
  [ -z "$id" ] || scancel --signal=TERM "$id"
}
told=
stop() {
  say "caught $1"
  told=$1
  [ "$1" = TERM ] || stop_run
}
trap 'stop TERM' TERM
trap 'stop USR1' USR1

# Slurm's TERM at a preemption must not end Ray before the run has cleaned up: Ray runs in a session below a shell that
# ignores TERM. The end of the step still ends it.
keep() { trap '' TERM; setsid "$@" & wait "$!"; }
until_head() {
  for _ in $(seq 240); do "$ray" health-check --address "$RAY_ADDRESS" >/dev/null 2>&1 && return; sleep 0.5; done
  echo "Ray's head at $RAY_ADDRESS did not respond within 2 minutes" >&2
  exit 1
}
join() { until_head; keep "$@"; }
run_on_all() {
  until_head
  "$python" -c '
import ray, sys, time
ray.init(log_to_driver=False, logging_level="error")
for _ in range(120):
    if sum(node["Alive"] for node in ray.nodes()) == int(sys.argv[1]):
        sys.exit()
    time.sleep(1)
sys.exit("not all nodes of the job joined Ray within 2 minutes")' "$SLURM_JOB_NUM_NODES"
  exec "$@"
}

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
say "starts on ${nodes[*]}"
ray_steps=()
if [ "${#nodes[@]}" -gt 1 ]; then
  ip=$(address "${nodes[0]}")
  port=$((20000 + SLURM_JOB_ID % 5000))
  RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')  # no command line has it
  export python ray RAY_ADDRESS="$ip:$port" RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0
  export -f keep until_head join run_on_all
  # The paths of Ray's sockets have at most 107 characters. Each start has its own directory.
  temp=/tmp/ray-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
  mkdir -p "$temp"
  step "${nodes[0]}" --job-name=ray bash -ec 'keep "$@"' - "$ray" start --block --head --node-ip-address="$ip" \
    --port="$port" --num-cpus="$SLURM_CPUS_ON_NODE" --temp-dir="$temp" --include-dashboard=false &
  ray_steps+=($!)
  for node in "${nodes[@]:1}"; do
    step "$node" --job-name=ray bash -ec 'join "$@"' - "$ray" start --block --address="$RAY_ADDRESS" \
      --node-ip-address="$(address "$node")" --num-cpus="$SLURM_CPUS_ON_NODE" &
    ray_steps+=($!)
  done
  command=(bash -ec 'run_on_all "$@"' - "${command[@]}")
fi

step "${nodes[0]}" --job-name=run "${command[@]}" &
run=$!
set +e
wait "$run"; code=$?
while kill -0 "$run" 2>/dev/null; do wait "$run"; code=$?; done  # a trapped signal ends wait early
say "the run ended with exit code $code"
[ "${#ray_steps[@]}" = 0 ] || kill -TERM "${ray_steps[@]}" 2>/dev/null
for each in "${ray_steps[@]}"; do while kill -0 "$each" 2>/dev/null; do wait "$each"; done; done
[ "${#ray_steps[@]}" = 0 ] || rm -rf "$temp"

if [ "$told" = USR1 ] || { [ "$code" = 143 ] && [ -z "$told" ]; }; then
  if [ "${SLURM_RESTART_COUNT:-0}" -lt "$requeues" ]; then
    say "requeues itself"
    scontrol requeue "$SLURM_JOB_ID" && sleep 300
  else
    say "was requeued $requeues times: submit it again to resume"
  fi
fi
exit "$code"
