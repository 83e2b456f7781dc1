// Tokens and numbers as text to show. A token may hold anything: it is shown as text, and never longer than it has to be.

const LONGEST_LABEL = 14; // characters
// Control characters, and those that change the direction of what follows.
const INVISIBLE = /[\u0000-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]/gu;
const NAMED = { "\n": "⏎", "\t": "⇥", "\r": "␍", " ": "␣" };

// The whole token, with signs in place of what cannot be seen.
export function fullLabel(token) {
  if (token.trim() === "") return [...token].map((sign) => NAMED[sign] ?? "␣").join("") || "(empty)";
  return token.replace(INVISIBLE, (sign) => NAMED[sign] ?? `⟨${sign.codePointAt(0).toString(16)}⟩`);
}

export function shortLabel(token) {
  const signs = characters(fullLabel(token).trim());
  return signs.length <= LONGEST_LABEL ? signs.join("") : `${signs.slice(0, LONGEST_LABEL - 1).join("")}…`;
}

// Characters as they are read: an emoji of several code points is one.
function characters(text) {
  const segmenter = Intl.Segmenter ? new Intl.Segmenter(undefined, { granularity: "grapheme" }) : null;
  return segmenter ? [...segmenter.segment(text)].map(({ segment }) => segment) : [...text];
}

// The label of a token by its number on an axis of `size` tokens, or the number where the axis has others.
export function tokenLabels({ tokens }, size) {
  const named = tokens !== null && tokens.length === size;
  return {
    named,
    full: (id) => (named ? fullLabel(tokens[id]) : `token ${id}`),
    short: (id) => (named ? shortLabel(tokens[id]) : String(id)),
  };
}

export function decimal(value) {
  if (!Number.isFinite(value)) return "–";
  if (value !== 0 && value < 0.0095) return value < 1e-5 ? "0.00001" : String(Number(value.toPrecision(1)));
  return value.toFixed(value >= 99.95 ? 0 : value >= 9.995 ? 1 : value < 0.0995 ? 3 : 2);
}

export const percent = (share) => `${share < 0.0995 ? (100 * share).toFixed(1) : (100 * share).toFixed(0)} %`;
export const iterations = (nIters) => (nIters === Infinity ? "∞" : String(nIters));

export function settingsLabel({ definition }, { nIters, tau }) {
  if (definition === "fixed") return "weights as they are";
  if (nIters === 1 || tau === 0) return "SoftMax";
  return `Sinkhorn, n_iters ${iterations(nIters)}${tau === 1 ? "" : `, tau ${decimal(tau)}`}`;
}
