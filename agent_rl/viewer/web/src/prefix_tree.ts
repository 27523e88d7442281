/** Where sequences that begin alike part. */

export interface Sequence {
  id: string;
  units: ArrayLike<number | string>;
}

/** The members agree on all units before `end`; there they part into the children, or end. */
export interface PrefixTree {
  members: string[];
  end: number;
  children: PrefixTree[];
}

export function prefixTree(sequences: Sequence[], start = 0): PrefixTree {
  const [first, ...others] = sequences;
  let end = start;
  while (end < first.units.length && others.every(({ units }) => units[end] === first.units[end])) end++;
  const members = sequences.map(({ id }) => id);
  if (!others.length) return { members, end, children: [] };
  const parted = new Map<number | string | undefined, Sequence[]>();
  for (const one of sequences) parted.set(one.units[end], [...(parted.get(one.units[end]) ?? []), one]);
  if (parted.size === 1) return { members, end, children: [] }; // all are the same
  return { members, end, children: [...parted.values()].map((some) => prefixTree(some, end)) };
}
