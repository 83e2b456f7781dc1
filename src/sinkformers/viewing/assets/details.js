// Numbers and lists beside the picture of a head: the column sums, what collects most, and the token in focus.
import { element, isolated } from "./dom.js";
import { mostReceived } from "./head_picture.js";
import { decimal, percent, tokenLabels } from "./labels.js";
import { column, largest, row } from "./statistics.js";

const MOST_LISTED = 6;

export function numbers({ head, result }) {
  const { smallestSum, largestSum, entropy, rowError, steps, converged } = result;
  const entries = [
    ["column sums", `${decimal(smallestSum)} to ${decimal(largestSum)}`],
    ["row sums", rowError < 5e-4 ? "1" : `off by up to ${decimal(rowError)}`],
    ["mean row entropy", `${decimal(entropy)} of ${decimal(Math.log(head.m))}`],
  ];
  if (result.nIters === Infinity) {
    entries.push(["the limit", converged ? `reached after ${steps} steps` : `not reached after ${steps} steps`]);
  }
  return element(
    "dl",
    { class: "numbers" },
    ...entries.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))),
  );
}

// What collects most, and for the token in focus where it looks and who looks at it.
export function lists(state, shown) {
  const { head, result } = shown;
  const [rowLabels, columnLabels] = head.shape.map((size) => tokenLabels(state.data, size));
  const { focus } = state;
  const i = head.rows.indexOf(focus.query ?? -1);
  const j = head.columns.indexOf(focus.key ?? -1);
  const rounded = result.sums.map((sum) => Number(sum.toFixed(3))); // equal sums stay in the order of the tokens
  const all = [bars("Tokens that collect most", head.columns, rounded, columnLabels, decimal, mostReceived(shown))];
  if (i >= 0) {
    const title = ["Where ", isolated(rowLabels.short(focus.query)), " looks"];
    all.push(bars(title, head.columns, row(result.weights, head.m, i), columnLabels, percent));
  }
  if (j >= 0) {
    const title = ["Who looks at ", isolated(columnLabels.short(focus.key))];
    all.push(bars(title, head.rows, column(result.weights, head.n, head.m, j), rowLabels, percent));
  }
  return all;
}

function bars(title, ids, values, labels, write, end = null) {
  const places = largest(values, MOST_LISTED);
  const most = end ?? Math.max(values[places[0]], 1e-12);
  const items = places.map((place) =>
    element(
      "li",
      {},
      element("span", { class: "name", title: labels.full(ids[place]) }, isolated(labels.short(ids[place]))),
      element("span", { class: "track" }, element("i", { style: { width: `${(100 * values[place]) / most}%` } })),
      element("span", { class: "value" }, write(values[place])),
    ),
  );
  return element("div", { class: "bars" }, element("h3", {}, ...[title].flat()), element("ol", {}, ...items));
}

// One sentence about the cell in focus.
export function readout(state, { head, result }) {
  const [rowLabels, columnLabels] = head.shape.map((size) => tokenLabels(state.data, size));
  const i = head.rows.indexOf(state.focus.query ?? -1);
  const j = head.columns.indexOf(state.focus.key ?? -1);
  if (i < 0 && j < 0) return ["Point at the map, or focus it and use the arrow keys; a click holds on to a cell."];
  const parts = [];
  if (i >= 0 && j >= 0 && state.focus.query !== state.focus.key) {
    const weight = result.weights[i * head.m + j];
    parts.push(isolated(rowLabels.full(state.focus.query)), " → ", isolated(columnLabels.full(state.focus.key)));
    parts.push(`: weight ${decimal(weight)}. `);
  }
  if (j >= 0) parts.push(isolated(columnLabels.full(state.focus.key)), ` receives ${decimal(result.sums[j])} in all. `);
  if (i >= 0) parts.push(isolated(rowLabels.full(state.focus.query)), ` has entropy ${decimal(result.entropies[i])}.`);
  if (state.pinned) parts.push(" Held: click again or press Escape.");
  return parts;
}
