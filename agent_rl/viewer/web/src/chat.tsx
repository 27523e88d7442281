/** A trajectory as a conversation: messages, folded thoughts, calls with their arguments, and what the tools returned. */

import type { ComponentChildren } from "preact";
import { LongText } from "./parts";
import { number as figure, plural, seconds, visible } from "./text";
import type { Branch, Trajectory, Turn } from "./types";

const OUTPUT = 1200;
const PROMPT = 2000;

/** The turns that lead to branch `index`: its own, and those before the places where it and its parents began. */
export function turnsOf(turns: Turn[], branches: Branch[], index: number): { turn: Turn; number: number; own: boolean }[] {
  const belongs = (turn: Turn) => {
    let [at, end] = [index as number | null, Infinity];
    while (at !== null && branches[at]) {
      if (turn.branch === at && (turn.span?.[1] ?? 0) <= end) return true;
      end = Math.min(end, branches[at].shared);
      at = branches[at].parent;
    }
    return branches.length === 0;
  };
  return turns.flatMap((turn, i) => (belongs(turn) ? [{ turn, number: i + 1, own: turn.branch === index }] : []));
}

export function ChatPrompt({ trajectory, open }: { trajectory: Trajectory; open: boolean }) {
  const reply = trajectory.messages.findIndex(({ role }) => role === "assistant");
  const before = reply < 0 ? trajectory.messages : trajectory.messages.slice(0, reply);
  return (
    <>
      {before.map(({ role, content }, i) => (
        <article class="message" key={i}>
          <h2>{visible(role)}</h2>
          <LongText text={content} name={`Message of ${role}`} first={PROMPT} open={open} />
        </article>
      ))}
    </>
  );
}

export function ChatTurn({ turn, number, open = false }: { turn: Turn; number: number; open?: boolean }) {
  return (
    <article class="message turn">
      <h2>
        Turn {number}{" "}
        <span class="dim">
          <TurnFigures turn={turn} />
        </span>
      </h2>
      {turn.left_out && <p class="dim">not trained: {visible(turn.left_out)}</p>}
      {turn.thoughts && (
        <Thoughts length={plural(turn.thoughts.length, "character")} open={open}>
          <LongText text={turn.thoughts} name={`Thoughts of turn ${number}`} />
        </Thoughts>
      )}
      {turn.said && <LongText text={turn.said} name={`Text of turn ${number}`} open={open} />}
      {turn.calls.map((call, i) => (
        <Call key={i} {...call} at={`turn ${number}`} open={open} />
      ))}
      {turn.parse_failure && <p class="bad">{visible(turn.parse_failure)}</p>}
      {turn.observation && (
        <div class="output">
          <h3>output</h3>
          <LongText text={turn.observation} name={`Output of turn ${number}`} first={OUTPUT} open={open} />
        </div>
      )}
    </article>
  );
}

export function TurnFigures({ turn }: { turn: Turn }) {
  return (
    <>
      {plural(turn.completion_tokens, "token")}, {seconds(turn.generate_seconds)} to write, {seconds(turn.tool_seconds)} to run
      {turn.reward !== null && `, reward ${figure(turn.reward)}`}
    </>
  );
}

/** Folded; a token that is selected in them, or a text that is found in them, unfolds them. */
export function Thoughts({ length, open = false, children }: { length: string; open?: boolean; children: ComponentChildren }) {
  return (
    <details open={open}>
      <summary class="dim">thoughts: {length}</summary>
      {children}
    </details>
  );
}

/** A call with its arguments; an exchange of one text for another is shown as a diff. */
function Call({ name, arguments: all, at, open }: Turn["calls"][number] & { at: string; open: boolean }) {
  const { old_str, new_str, ...others } = all;
  const edit = typeof old_str === "string" && typeof new_str === "string" ? diffOf(old_str, new_str) : null;
  return (
    <div class="call" role="group" aria-label={`Call of ${visible(name)}`}>
      <h3>
        calls <b>{visible(name)}</b>
      </h3>
      {Object.entries(edit === null ? all : others).map(([key, value]) => (
        <Argument key={key} name={key} value={typeof value === "string" ? value : JSON.stringify(value)} at={at} open={open} />
      ))}
      {edit !== null && <LongText text={edit} name={`Edit of ${at}`} open={open} diff />}
    </div>
  );
}

function Argument({ name, value, at, open }: { name: string; value: string; at: string; open: boolean }) {
  if (value.length < 100 && !value.includes("\n"))
    return (
      <p class="argument">
        <span class="dim">{visible(name)}</span> <code>{visible(value)}</code>
      </p>
    );
  return (
    <>
      <p class="argument dim">{visible(name)}</p>
      <LongText text={value} name={`${visible(name)} of ${at}`} first={OUTPUT} open={open} />
    </>
  );
}

function diffOf(before: string, after: string): string {
  const marked = (text: string, sign: string) => text.split("\n").map((line) => sign + line);
  return [...marked(before, "-"), ...marked(after, "+")].join("\n");
}
