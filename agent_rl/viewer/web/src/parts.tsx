/** Small parts that several pages use. */

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { Loaded } from "./data";
import { plural, visible } from "./text";
import type { Answer } from "./types";

/** What a resource became: its failure, its notes, and the page that is made of it. */
export function Resource<T extends Answer>({ of, children }: { of: Loaded<T>; children: (value: T) => ComponentChildren }) {
  return (
    <>
      {of.error && (
        <p class="note bad" role="alert">
          {visible(of.error)}
        </p>
      )}
      {of.value && <Notes notes={of.value.notes} />}
      {of.value ? children(of.value) : !of.error && <p class="dim">Reading …</p>}
    </>
  );
}

export function Notes({ notes }: { notes: string[] }) {
  return (
    <>
      {notes.map((note) => (
        <p class="note" key={note}>
          {visible(note)}
        </p>
      ))}
    </>
  );
}

export function Fact({ name, children, title }: { name: string; children: ComponentChildren; title?: string }) {
  return (
    <div class="fact" title={title}>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

interface Long {
  text: string;
  name: string;
  /** How many characters are shown at first. */
  first?: number;
  open?: boolean;
  /** That the text is a diff, although it has no head. */
  diff?: boolean;
}

/** A text of which, where it is long, only the beginning is shown until the rest is asked for. A diff is coloured. */
export function LongText({ text, name, first = 20_000, open = false, diff }: Long) {
  const [all, setAll] = useState(open);
  const long = text.length > first;
  return (
    <>
      <pre tabIndex={0} role="region" aria-label={name}>
        <Lines text={long && !all ? beginning(text, first) : text} diff={diff} />
      </pre>
      {long && (
        <button aria-expanded={all} onClick={() => setAll(!all)}>
          {all ? "Show less" : `Show all ${plural(text.length, "character")}`}
        </button>
      )}
    </>
  );
}

function beginning(text: string, first: number): string {
  const end = text.lastIndexOf("\n", first);
  return text.slice(0, end > 0 ? end : first);
}

const DIFF = /^(diff --git |@@ -\d|--- .*\n\+\+\+ )/m;

/** Text, line by line where it is a diff of a size that can be shown so. */
function Lines({ text, diff }: { text: string; diff?: boolean }) {
  if (text.length > 200_000 || !(diff || DIFF.test(text))) return <>{visible(text)}</>;
  return (
    <>
      {text.split("\n").map((line, i) => (
        <span key={i} class={lineClass(line)}>{`${visible(line)}\n`}</span>
      ))}
    </>
  );
}

function lineClass(line: string): string {
  if (/^(\+\+\+|---|diff|index|@@)/.test(line)) return "hunk";
  return line.startsWith("+") ? "added" : line.startsWith("-") ? "removed" : "";
}

/** How an episode came out, in a word and a colour. */
export function Outcome({ resolved, reward, stop }: { resolved: boolean; reward: number | null; stop: string }) {
  if (reward === null && !resolved) return <span class="outcome none">{stop}</span>;
  return <span class={resolved ? "outcome good" : "outcome bad"}>{resolved ? "resolved" : "not resolved"}</span>;
}

/** The row of a table's column heads. */
export function Heads({ names }: { names: string[] }) {
  return (
    <tr>
      {names.map((name) => (
        <th scope="col" key={name}>
          {name}
        </th>
      ))}
    </tr>
  );
}
