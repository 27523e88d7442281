/** One metric of one or more runs as curves, drawn by uPlot once it comes near the window. */

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { colours, scheme } from "./scheme";
import { number } from "./text";

export interface Mark {
  x: number;
  name: string;
}

export interface Line {
  name: string;
  colour: string;
  x: number[];
  y: (number | null)[];
  /** Bounds of a 95 % interval, of the same length as `y`. */
  low?: (number | null)[];
  high?: (number | null)[];
  marks: Mark[];
}

export interface ChartProps {
  name: string;
  unit: string;
  explain: string;
  lines: Line[];
  xName: string;
  /** Whether it stays at the top, and what changes that; a chart without it always has its place. */
  pinned?: boolean;
  pin?: () => void;
}

const HEIGHT = 170;
/** Of a curve's line. */
const WIDTH = 1.5;
const FONT = "11px sans-serif";
/** Distances between the marks of an axis that counts. */
const WHOLE = [1, 2, 5].flatMap((one) => [0, 1, 2, 3, 4, 5].map((power) => one * 10 ** power)).sort((a, b) => a - b);

export function Chart(props: ChartProps) {
  const place = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0); // until it comes near the window
  const [reading, setReading] = useState("");
  const plot = useRef<uPlot | null>(null);
  useEffect(() => whenNear(place.current!, setWidth), []);
  useLayoutEffect(() => {
    if (!width) return;
    plot.current = draw(place.current!, width, props, (index) => setReading(readingAt(plot.current, props, index)));
    return () => plot.current?.destroy();
  }, [width > 0, props.lines, props.xName, scheme.value]);
  useLayoutEffect(() => {
    if (plot.current && plot.current.width !== width) plot.current.setSize({ width, height: HEIGHT }); // it draws anew
  }, [width]);
  return (
    <figure class="chart" tabIndex={0} role="group" aria-label={summary(props)} onKeyDown={(e) => onKey(e, plot.current)}>
      <figcaption title={props.explain}>
        <span class="name">
          <b>{props.name}</b> <span class="dim">{props.unit}</span>
        </span>
        {props.pin && (
          <button class="pin" aria-pressed={props.pinned} aria-label={`Pin ${props.name}`} onClick={props.pin}>
            {props.pinned ? "unpin" : "pin"}
          </button>
        )}
      </figcaption>
      <div ref={place} class="plot" aria-hidden="true" style={{ height: `${HEIGHT}px` }} />
      <output aria-live={reading ? "polite" : "off"}>{reading || latest(props)}</output>
    </figure>
  );
}

/** Tells the width of an element from when it comes near the window on. To ask for it would lay the page out each time. */
function whenNear(element: Element, found: (width: number) => void): () => void {
  const sizes = new ResizeObserver(([{ contentRect }]) => found(Math.round(contentRect.width)));
  const near = new IntersectionObserver(
    (entries) => {
      const entry = entries.find(({ isIntersecting }) => isIntersecting);
      if (!entry) return;
      near.disconnect();
      sizes.observe(element);
      found(Math.round(entry.boundingClientRect.width));
    },
    { rootMargin: "300px" },
  );
  near.observe(element);
  return () => {
    near.disconnect();
    sizes.disconnect();
  };
}

function last(line: Line): number | null {
  return line.y.findLast((y) => y != null) ?? null;
}

function latest({ lines }: ChartProps): string {
  return lines.map((line) => `${lines.length > 1 ? `${line.name} ` : "last "}${number(last(line))}`).join(" · ");
}

function summary({ name, unit, explain, lines }: ChartProps): string {
  const parts = lines.map((line) => {
    const first = line.y.find((y) => y != null) ?? null;
    return `${line.name}: ${line.x.length} points, first ${number(first)}, last ${number(last(line))}`;
  });
  return `${name} in ${unit}. ${explain} ${parts.join("; ")}. The arrow keys read a point.`;
}

function onKey(event: KeyboardEvent, plot: uPlot | null): void {
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!plot || !move) return;
  event.preventDefault();
  const xs = plot.data[0];
  const at = plot.cursor.idx == null ? (move > 0 ? 0 : xs.length - 1) : plot.cursor.idx + move;
  const index = Math.min(xs.length - 1, Math.max(0, at));
  plot.setCursor({ left: plot.valToPos(xs[index], "x"), top: plot.over.clientHeight / 2 });
}

function readingAt(plot: uPlot | null, { lines, xName }: ChartProps, index: number | null | undefined): string {
  if (!plot || index == null) return "";
  const places = starts(lines);
  const values = lines.map((line, i) => `${line.name} ${number(plot.data[places[i]][index])}`);
  return `${xName} ${number(plot.data[0][index])}: ${values.join(" · ")}`;
}

/** A line's values, and the bounds of their intervals where it has any. */
function columnsOf({ y, low, high }: Line): (number | null)[][] {
  return low && high ? [y, low, high] : [y];
}

/** The place of each line's values among all columns, of which the first is x. */
function starts(lines: Line[]): number[] {
  let next = 1;
  return lines.map((line) => (next += columnsOf(line).length) - columnsOf(line).length);
}

function table(lines: Line[]): uPlot.AlignedData {
  const tables = lines.map((line): uPlot.AlignedData => [line.x, ...columnsOf(line)]);
  return tables.length === 1 ? tables[0] : uPlot.join(tables);
}

function draw(place: HTMLElement, width: number, props: ChartProps, onCursor: (index: number | null | undefined) => void): uPlot {
  const { ink, line } = colours.value;
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: FONT };
  const series = props.lines.flatMap((line): uPlot.Series[] => [
    { stroke: line.colour, width: WIDTH, spanGaps: true, points: { size: 4, show: line.x.length < 60 }, paths: line.low ? joined : curve(line.colour) },
    ...columnsOf(line).slice(1).map((): uPlot.Series => ({ width: 0, points: { show: false } })),
  ]);
  const places = starts(props.lines);
  const bands = props.lines.flatMap(({ low, colour }, i): uPlot.Band[] =>
    low ? [{ series: [places[i] + 2, places[i] + 1], fill: `${colour}33` }] : [],
  );
  const options: uPlot.Options = {
    width,
    height: HEIGHT,
    legend: { show: false },
    fmtDate: () => String, // no axis is of dates; else each chart would take up 15 templates of them
    cursor: { drag: { x: true, y: false } },
    scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) } },
    axes: [
      { ...axis, size: 30, label: props.xName, labelFont: FONT, labelSize: 15, labelGap: 0, incrs: props.xName === "step" ? WHOLE : undefined },
      { ...axis, size: 58, values: (_, ticks) => ticks.map((tick) => number(tick)) },
    ],
    series: [{}, ...series],
    bands,
    hooks: { setCursor: [(u) => onCursor(u.cursor.idx)], draw: [(u) => drawMarks(u, props.lines)] },
  };
  return new uPlot(options, table(props.lines), (plot, init) => {
    plot.batch(init); // draws it. In the page, a canvas has all styles worked out before it draws a text
    place.append(plot.root);
  });
}

const joined = uPlot.paths.linear!();

/** All points joined by lines. Where there are several a pixel, each column of pixels is filled from the least to the
 * most of its points instead, which looks the same: without a GPU, a thousand joined lines take many times as long. */
function curve(colour: string): uPlot.Series.PathBuilder {
  return (plot, series, from, to) => {
    if (to - from < 2 * plot.bbox.width) return joined(plot, series, from, to);
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.fillStyle = ctx.strokeStyle = colour;
    ctx.lineWidth = WIDTH * devicePixelRatio;
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width + ctx.lineWidth, bbox.height + ctx.lineWidth);
    ctx.clip();
    fillColumns(plot, series, from, to);
    ctx.restore();
    return null; // there is no path to draw, and this is called again whenever the chart is drawn
  };
}

function fillColumns(plot: uPlot, series: number, from: number, to: number): void {
  const { ctx } = plot;
  const width = ctx.lineWidth;
  let [column, last, least, most] = [NaN, NaN, NaN, NaN];
  const fill = () => ctx.fillRect(column, least, width, most - least + width);
  ctx.beginPath();
  for (let i = from; i <= to; i++) {
    const value = plot.data[series][i];
    if (value == null) continue;
    const x = Math.round(plot.valToPos(plot.data[0][i], "x", true));
    const y = plot.valToPos(value, "y", true);
    if (x !== column) {
      fill();
      if (x > column + 1) {
        ctx.moveTo(column, last); // over a gap
        ctx.lineTo(x, y);
      }
      least = most = x === column + 1 ? last : y;
      column = x;
    }
    least = Math.min(least, y);
    most = Math.max(most, y);
    last = y;
  }
  fill();
  ctx.stroke();
}

/** A dashed line where a run was resumed or its guard spoke, with the word beside it. */
function drawMarks(plot: uPlot, lines: Line[]): void {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.font = `${11 * devicePixelRatio}px sans-serif`;
  ctx.textAlign = "left";
  for (const line of lines)
    for (const mark of line.marks) {
      const x = plot.valToPos(mark.x, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = line.colour;
      ctx.setLineDash([4, 4]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.fillText(mark.name, x + 3, bbox.top + 11 * devicePixelRatio);
    }
  ctx.restore();
}
