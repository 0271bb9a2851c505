// Figures and times as text.

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** What pages say where they first use J. */
export const J_MEANING = "J is validation accuracy (in loss-based suites, the relative loss reduction) minus rent, the price of added parameters.";

/** With three decimals, or "–" where nothing was measured. */
export const score = (value) => (isNumber(value) ? value.toFixed(3).replace("-", "−") : "–");

/** Of any size: three decimals, or three digits of what is small, or whole thousands. */
export function measure(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  const text = value && size < 0.1 ? String(Number(value.toPrecision(3))) : size < 1000 ? value.toFixed(3) : size < 1e9 ? value.toFixed(0) : value.toExponential(2);
  return text.replace("-", "−");
}

/** As `measure`, with its sign; zero has none. */
export const difference = (value) => (value > 0 ? `+${measure(value)}` : measure(value));

/** A difference with its standard error, where that is known: "+0.016 ± 0.004". */
export const estimate = (value, error) => `${difference(value)}${isNumber(value) && isNumber(error) ? ` ± ${measure(error)}` : ""}`;

/** With its sign; what rounds to zero has none. */
export function signed(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value).toFixed(3);
  return Number(size) === 0 ? size : `${value < 0 ? "−" : "+"}${size}`;
}

/** Never zero. */
export const pValue = (p) => (p < 0.001 ? "<0.001" : p.toFixed(3));

export const percent = (value) => (isNumber(value) ? `${(100 * value).toFixed(1)}%` : "–");

/** How the loss changes without a seed, with the standard error where that is known: "1.6% ± 0.4% higher without it". */
export function lossGain({ loss_gain: gain, loss_error: error }) {
  if (!isNumber(gain)) return "–";
  return `${percent(Math.abs(gain))}${isNumber(error) ? ` ± ${percent(error)}` : ""} ${gain < 0 ? "lower" : "higher"} without it`;
}

/** As short as four digits allow. */
export function brief(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e5)) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

export const whole = (value) => (isNumber(value) ? String(value) : "–");

/** Time of day of seconds since 1970. */
export const clock = (seconds) =>
  isNumber(seconds) ? new Date(seconds * 1000).toLocaleTimeString([], { hour12: false }) : "–";

/** A name as words. */
export const words = (name) => String(name ?? "–").replaceAll("_", " ");

/** The entry of a list that run content may lack. */
export const named = (list, index, kind) => {
  const name = Array.isArray(list) ? list[index] : undefined;
  return name === undefined || name === null ? `${kind} ${index ?? "–"}` : String(name);
};
