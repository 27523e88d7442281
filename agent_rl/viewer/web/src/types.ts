/** The resources that the page reads: those of agent_rl/viewer/api.py. */

export interface Failure {
  kind: "absent" | "damaged" | "unknown";
  text: string;
}

export interface Answer {
  notes: string[];
}

export interface RunLine {
  run: number;
  name: string;
  directory: string;
  kind: string;
  steps: number;
  total: number | null;
  state: string;
  pass_at_1: [number, number, number] | null;
  guard: number;
}

export interface Runs extends Answer {
  runs: RunLine[];
}

export interface Evaluation {
  key: string;
  n: string | null;
  step: number;
  decoding: string;
  pass_at_1: number | null;
  interval: [number, number] | null;
  graded: number;
  tasks: number;
  ungraded: number;
  infrastructure_failures: number;
  seconds: number | null;
  stops: Record<string, number>;
  samples: number | null;
  /** A rate, or a rate with the interval and the number of its tasks. */
  pass_at_k: Record<string, number | null | PassAtK> | null;
  policy: string | null;
  model: string | null;
  available: number | null;
  requested: number | null;
  usage: Usage | null;
  cost: number | null;
}

export interface PassAtK {
  rate: number | null;
  interval: [number, number];
  tasks: number;
}

export interface Usage {
  requests: number;
  prompt: number;
  completion: number;
  cached: number;
  reasoning: number;
}

export interface Run extends Answer {
  name: string;
  directory: string;
  kind: string;
  state: string;
  steps: number;
  total: number | null;
  model: string | null;
  config: Record<string, unknown>;
  facts: Record<string, number | null>;
  format: number | null;
  filed: string[];
  detail: string[];
  evaluations: Evaluation[];
  guard: { step: number; event: string; text: string }[];
  resumes: number[];
  summary: Record<string, unknown> | null;
}

export interface Metrics extends Answer {
  steps: number[];
  time: (number | null)[];
  sampled_tokens: (number | null)[];
  columns: Record<string, (number | null)[]>;
  help: Record<string, string>;
  units: Record<string, string>;
}

export interface Columns {
  id: string[];
  n: string[];
  step: number[];
  group: number[];
  task: string[];
  reward: (number | null)[];
  resolved: boolean[];
  stop: string[];
  turns: number[];
  tokens: number[];
  sampled: number[];
  hacks: number[];
  training_status: (string | null)[];
  advantage: (number | null)[];
  branches: number[];
  versions: number[];
  seconds: number[];
  began: (number | null)[];
  worst_gap: (number | null)[];
  worst_gap_without_replay: (number | null)[];
}

export interface Index extends Answer {
  total: number;
  found: number;
  columns: Columns;
}

export interface Step extends Answer {
  n: string;
  step: number;
  columns: Columns;
  groups: { group: number; task: string; infrastructure_failures: number; members: string[]; trained: boolean }[];
}

export interface Turn {
  branch: number;
  message: number | null;
  observation_message: number | null;
  tool: string | null;
  arguments: Record<string, unknown>;
  parse_failure: string | null;
  /** The rule that leaves the turn out of training. */
  left_out?: string;
  text: string;
  observation: string;
  span: [number, number] | null;
  prompt_tokens: number;
  completion_tokens: number;
  observation_tokens: number;
  cached_tokens: number;
  retractions: number;
  weight_version: string;
  began: number | null;
  generate_seconds: number;
  tool_seconds: number;
  thinking_tokens: number;
  thinking_chars: number;
  /** What the grade gives to the turn. */
  reward: number | null;
  /** The text as it reads: thoughts, what is said beside the calls, and the calls. */
  thoughts: string;
  said: string;
  calls: { name: string; arguments: Record<string, unknown> }[];
}

export interface Detail {
  gap: (number | null)[];
  gap_without_replay: (number | null)[] | null;
  entropy: (number | null)[] | null;
  flags: number[];
  differs: number[] | null;
  differs_without_replay: number[] | null;
}

export interface Branch {
  parent: number | null;
  shared: number;
  cause: string;
  tokens: number[];
  pieces: string[] | null;
  sampled: [number, number][];
  versions: [number, number, string][];
  logprobs: (number | null)[];
  detail: Detail | null;
}

export interface ModelCall {
  client: string;
  model: string;
  messages: { role: string; content: string }[];
  response: string;
  seconds: number;
  cached: boolean;
}

export interface Trajectory extends Answer {
  id: string;
  n: string;
  step: number;
  group: number;
  siblings: string[];
  task: string;
  env: string;
  reward: number | null;
  resolved: boolean;
  stop: string;
  error: string;
  training_status: string | null;
  advantage: number | null;
  hacks: string[];
  patch: string;
  parts: Record<string, number>;
  metrics: Record<string, number>;
  model_calls: ModelCall[];
  tests: Record<string, string>;
  test_log: string;
  times: {
    began: number | null;
    queue: number | null;
    start: number | null;
    grade_began: number | null;
    grade: number | null;
    total: number | null;
  };
  messages: { role: string; content: string }[];
  turns: Turn[];
  branches: Branch[];
}

export interface RouteMap extends Answer {
  id: string;
  layers: number;
  rows: number;
  differs: [number, number][] | null;
  differs_without_replay: [number, number][] | null;
}

export interface Routes extends Answer {
  from: number;
  to: number;
  rows: number;
  layers: number;
  experts: number[][][];
  present: boolean[];
  differs: number[][] | null;
  differs_without_replay: number[][] | null;
}

export interface Loads extends Answer {
  n: string;
  layers: number;
  num_experts: number;
  loads: number[][] | null;
}

export interface Outcome {
  task_id: string;
  repo: string;
  graded: number;
  resolved: number;
  infrastructure_failures: number;
  suspected_hacks: number;
  stops: string[];
  turns_mean: number | null;
  error: string;
  seconds_mean?: number | null;
  usage?: Usage | null;
  cost?: number | null;
  samples: Sample[];
}

/** One trajectory of a task. */
export interface Sample {
  id: string;
  reward: number | null;
  resolved: boolean;
  stop: string;
  turns: number;
  seconds: number;
  tokens: number | null;
}

export interface EvaluationPage extends Evaluation, Answer {
  outcomes: Outcome[];
}

export interface Live extends Answer {
  step: number | null;
  episodes: {
    task: string;
    reward: number | null;
    resolved: boolean;
    stop: string;
    turns: number;
    tokens: number;
    sampled: number;
    seconds: number;
    began: number | null;
  }[];
  expected: number | null;
}

/** Which trajectories an export holds, by the run's number. */
export interface Exported extends Answer {
  trajectories: Record<string, string[]>;
}

/** A place where the searched text stands. */
export interface Hit {
  id: string;
  task: string;
  turn: number | null;
  part: "prompt" | "turn" | "observation" | "patch" | "test_log" | "error";
  before: string;
  match: string;
  after: string;
}

export interface Found extends Answer {
  hits: Hit[];
  searched: number;
  total: number;
}
