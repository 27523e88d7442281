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

const FIRST = 20_000;

/** A text of which, where it is long, only the beginning is shown until the rest is asked for. */
export function LongText({ text, name }: { text: string; name: string }) {
  const [all, setAll] = useState(false);
  const cut = !all && text.length > FIRST;
  return (
    <>
      <pre tabIndex={0} role="region" aria-label={name}>
        {visible(cut ? text.slice(0, FIRST) : text)}
      </pre>
      {cut && <button onClick={() => setAll(true)}>Show all {plural(text.length, "character")}</button>}
    </>
  );
}

/** How an episode came out, in a word and a colour. */
export function Outcome({ resolved, reward, stop }: { resolved: boolean; reward: number | null; stop: string }) {
  if (reward === null && !resolved) return <span class="outcome none">{stop}</span>;
  return <span class={resolved ? "outcome good" : "outcome bad"}>{resolved ? "resolved" : "not resolved"}</span>;
}
