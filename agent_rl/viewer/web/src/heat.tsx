/** A table of numbers as a picture: rows x columns on a canvas, read with the mouse or the arrow keys. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { number } from "./text";
import { scheme } from "./scheme";

export interface Heat {
  name: string;
  rows: string[];
  columns: number;
  columnName: (column: number) => string;
  /** The value of a cell; null where there is none. */
  value: (row: number, column: number) => number | null;
  limit: number;
  unit: string;
}

const STOPS = { light: [[246, 246, 242], [253, 190, 110], [200, 30, 60], [70, 0, 60]], dark: [[34, 36, 42], [120, 50, 110], [240, 90, 70], [255, 240, 160]] };
const MOST_COLUMNS = 1600;

/** Where `share` from 0 to 1 lies on the ramp of the scheme, as red, green and blue. */
function ramp(share: number, dark: boolean): [number, number, number] {
  const stops = dark ? STOPS.dark : STOPS.light;
  const at = Math.min(0.9999, Math.max(0, share)) * (stops.length - 1);
  const from = stops[Math.floor(at)];
  const to = stops[Math.floor(at) + 1];
  const part = at - Math.floor(at);
  return [0, 1, 2].map((i) => Math.round(from[i] + (to[i] - from[i]) * part)) as [number, number, number];
}

/** Neighbouring columns share a pixel where there are more of them than pixels: the largest of them shows. */
function paint(canvas: HTMLCanvasElement, heat: Heat, dark: boolean) {
  const width = Math.min(heat.columns, MOST_COLUMNS);
  canvas.width = Math.max(1, width);
  canvas.height = Math.max(1, heat.rows.length);
  const context = canvas.getContext("2d");
  if (!context || !width) return;
  const image = context.createImageData(canvas.width, canvas.height);
  for (let row = 0; row < heat.rows.length; row++) {
    for (let x = 0; x < width; x++) {
      const [r, g, b, a] = pixel(heat, row, columnsAt(heat, x, width), dark);
      image.data.set([r, g, b, a], 4 * (row * width + x));
    }
  }
  context.putImageData(image, 0, 0);
}

function columnsAt(heat: Heat, x: number, width: number): [number, number] {
  const first = Math.floor((x * heat.columns) / width);
  return [first, Math.max(first + 1, Math.floor(((x + 1) * heat.columns) / width))];
}

function pixel(heat: Heat, row: number, [first, end]: [number, number], dark: boolean): [number, number, number, number] {
  let most: number | null = null;
  for (let column = first; column < end; column++) {
    const value = heat.value(row, column);
    if (value != null && (most == null || value > most)) most = value;
  }
  return most == null ? [0, 0, 0, 0] : [...ramp(most / heat.limit, dark), 255];
}

const MOST_TICKS = 8;

/** Columns whose names are written below the picture, from the first to the last. */
function ticks(columns: number): number[] {
  const count = Math.min(MOST_TICKS, columns);
  return Array.from({ length: count }, (_, i) => Math.round((i * (columns - 1)) / Math.max(1, count - 1)));
}

/** The cell with the largest value. */
function largest(heat: Heat): { row: number; column: number; value: number } | null {
  let found: { row: number; column: number; value: number } | null = null;
  for (let row = 0; row < heat.rows.length; row++)
    for (let column = 0; column < heat.columns; column++) {
      const value = heat.value(row, column);
      if (value != null && (!found || value > found.value)) found = { row, column, value };
    }
  return found;
}

/** `onPick` is told the column that was clicked. A picture is drawn anew for another `heat` alone. */
export function HeatMap({ heat, onPick }: { heat: Heat; onPick?: (column: number) => void }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [cell, setCell] = useState<{ row: number; column: number } | null>(null);
  const dark = scheme.value === "dark";
  useEffect(() => {
    if (canvas.current) paint(canvas.current, heat, dark);
  }, [heat, dark]);
  const most = useMemo(() => largest(heat), [heat]);
  const reading = (at: { row: number; column: number }) =>
    `${heat.rows[at.row]}, ${heat.columnName(at.column)}: ${number(heat.value(at.row, at.column))} ${heat.unit}`;
  const summary = most ? `Largest: ${reading(most)}.` : "Nothing was recorded.";
  const at = (event: MouseEvent) => {
    const box = canvas.current!.getBoundingClientRect();
    const part = (place: number, size: number, count: number) =>
      Math.min(count - 1, Math.max(0, Math.floor((place / size) * count)));
    return {
      row: part(event.clientY - box.top, box.height, heat.rows.length),
      column: part(event.clientX - box.left, box.width, heat.columns),
    };
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const from = cell ?? most ?? { row: 0, column: 0 };
    if (event.key === "Enter" && cell) onPick?.(cell.column);
    if (!move) return;
    event.preventDefault();
    setCell({
      row: Math.min(heat.rows.length - 1, Math.max(0, from.row + move[0])),
      column: Math.min(heat.columns - 1, Math.max(0, from.column + move[1])),
    });
  };
  return (
    <figure class="heat">
      <figcaption>
        <b>{heat.name}</b> <span class="dim">{summary}</span>
      </figcaption>
      <div class="heat-body">
        <ol class="heat-rows" aria-hidden="true">
          {heat.rows.map((row) => (
            <li key={row}>{row}</li>
          ))}
        </ol>
        <div class="heat-picture">
          <canvas
            ref={canvas}
            style={{ height: `${Math.min(420, Math.max(60, 18 * heat.rows.length))}px` }}
            role="img"
            tabIndex={0}
            aria-label={`${heat.name}, ${heat.rows.length} rows, ${heat.columns} columns. ${summary} The arrow keys read a cell.`}
            onMouseMove={(event) => setCell(at(event))}
            onMouseLeave={() => setCell(null)}
            onClick={(event) => onPick?.(at(event).column)}
            onKeyDown={onKeyDown}
          />
          <ol class={`heat-columns ${heat.columns > MOST_TICKS ? "many" : ""}`} aria-hidden="true">
            {ticks(heat.columns).map((column) => (
              <li key={column} style={{ left: `${(100 * (column + 0.5)) / heat.columns}%` }}>
                {heat.columnName(column)}
              </li>
            ))}
          </ol>
        </div>
      </div>
      <div class="heat-foot">
        <span class="ramp" aria-hidden="true" /> <span>0 to {number(heat.limit)} {heat.unit}</span>
        <output aria-live="polite">{cell ? reading(cell) : ""}</output>
      </div>
    </figure>
  );
}
