/** How the page writes text and numbers. */

const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

/** `text` with a sign in place of each code unit that nobody would see or that would reorder its neighbours. The
 * length is kept, so offsets into the text stay true. */
export function visible(text: string): string {
  return text.replace(HIDDEN, (unit) => sign(unit.charCodeAt(0)));
}

function sign(code: number): string {
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  return code === 0x7f ? "␡" : "⎕";
}

/** `text` on one line, for a label. */
export function oneLine(text: string): string {
  return visible(text).replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}

const whole = new Intl.NumberFormat("en");

export function number(value: number | null | undefined, digits = 4): string {
  if (value == null) return "–";
  if (!Number.isFinite(value)) return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return whole.format(value);
  const size = Math.abs(value);
  return size >= 1e6 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}

export function percent(value: number | null | undefined): string {
  return value == null ? "–" : `${(100 * value).toFixed(1)} %`;
}

export function seconds(value: number | null | undefined): string {
  if (value == null) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  const minutes = value / 60;
  return minutes < 100 ? `${minutes.toFixed(1)} min` : `${(minutes / 60).toFixed(1)} h`;
}

/** `count` and its noun: "1 turn", "2 turns". */
export function plural(count: number, noun: string): string {
  return `${whole.format(count)} ${noun}${count === 1 ? "" : "s"}`;
}
