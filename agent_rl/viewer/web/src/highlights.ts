/** Colours of tokens by the CSS Custom Highlight API: 16 highlights over whole text nodes, no element a token. */

export const BINS = 16;
export const PLAIN = -1;

/** Tokens `first` to `end` of a trajectory as one text; token `first + i` is text[offsets[i]:offsets[i + 1]]. */
export interface Stretch {
  first: number;
  end: number;
  text: string;
  offsets: Int32Array;
}

export interface Shown {
  stretch: Stretch;
  node: Text;
}

function named(name: string): Highlight {
  const found = CSS.highlights.get(name) ?? new Highlight();
  CSS.highlights.set(name, found);
  return found;
}

/** Colour every token by its bin; `bins` has one a token of the trajectory, PLAIN for no colour. */
export function paint(shown: Iterable<Shown>, bins: Int8Array): void {
  const highlights = Array.from({ length: BINS }, (_, bin) => named(`bin-${bin}`));
  for (const highlight of highlights) highlight.clear();
  for (const { stretch, node } of shown) paintStretch(stretch, node, bins, highlights);
}

/** Neighbours of one bin share a range. */
function paintStretch({ first, end, offsets }: Stretch, node: Text, bins: Int8Array, highlights: Highlight[]): void {
  for (let from = first; from < end; ) {
    let to = from + 1;
    while (to < end && bins[to] === bins[from]) to++;
    if (bins[from] !== PLAIN) {
      const [startOffset, endOffset] = [offsets[from - first], offsets[to - first]];
      highlights[bins[from]].add(new StaticRange({ startContainer: node, startOffset, endContainer: node, endOffset }));
    }
    from = to;
  }
}

/** Mark one token (none while null), and return where it stands in the page. */
export function mark(shown: Iterable<Shown>, token: number | null): Range | null {
  const highlight = named("selected");
  highlight.priority = 1; // over the colours, whichever were laid first
  highlight.clear();
  for (const { stretch, node } of shown) {
    if (token === null || token < stretch.first || token >= stretch.end) continue;
    const range = rangeOf(stretch, node, token);
    highlight.add(range);
    return range;
  }
  return null;
}

/** The characters of a token; of one whose character only ends with a later token, that character. */
function rangeOf({ first, offsets, text }: Stretch, node: Text, token: number): Range {
  const range = new Range();
  const start = offsets[token - first];
  range.setStart(node, start);
  range.setEnd(node, Math.min(text.length, Math.max(start + 1, offsets[token - first + 1])));
  return range;
}

/** The token at a point of the window. */
export function tokenAt(shown: Iterable<Shown>, x: number, y: number): number | null {
  const place = caretAt(x, y);
  for (const { stretch, node } of shown) {
    if (place?.node === node) return stretch.first + lastAtOrBefore(stretch.offsets, place.offset);
  }
  return null;
}

function caretAt(x: number, y: number): { node: Node; offset: number } | null {
  if (document.caretPositionFromPoint) {
    const place = document.caretPositionFromPoint(x, y);
    return place && { node: place.offsetNode, offset: place.offset };
  }
  const range = document.caretRangeFromPoint(x, y);
  return range && { node: range.startContainer, offset: range.startOffset };
}

/** The last token that begins at or before a character, and is not empty. */
function lastAtOrBefore(offsets: Int32Array, character: number): number {
  let [low, high] = [0, offsets.length - 2];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (offsets[middle] <= character) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** The text of tokens `first` to `end`, and where each of them begins in it. */
export function stretchOf(pieces: string[], first: number, end: number, show: (text: string) => string): Stretch {
  const offsets = new Int32Array(end - first + 1);
  for (let token = first; token < end; token++) offsets[token - first + 1] = offsets[token - first] + pieces[token].length;
  return { first, end, text: show(pieces.slice(first, end).join("")), offsets };
}

/** Mark the first place of `text` below `root`, unfold it and scroll there. Returns what takes the mark away. */
export function markText(root: Element | null, text: string): () => void {
  const highlight = named("found");
  const range = root && rangeOfText(root, text.toLowerCase());
  if (range) {
    highlight.add(range);
    range.startContainer.parentElement?.closest("details")?.setAttribute("open", "");
  }
  (range?.startContainer.parentElement ?? root)?.scrollIntoView({ block: "center" });
  return () => highlight.clear();
}

function rangeOfText(root: Element, text: string): Range | null {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const start = (node.nodeValue ?? "").toLowerCase().indexOf(text);
    if (start < 0) continue;
    const range = new Range();
    range.setStart(node, start);
    range.setEnd(node, Math.min(start + text.length, node.nodeValue!.length)); // lower case may be longer
    return range;
  }
  return null;
}
