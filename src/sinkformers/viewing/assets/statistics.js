// The weights of a head for given settings, and what is shown of them.
import { sinkhorn } from "./sinkhorn.js";
import { streaming, streamingIterations } from "./streaming.js";

// Return weights and statistics of a head. Column sums are relative to those of even attention: 1 is an even share.
export function attention(head, { nIters, tau }) {
  const { n, m, definition } = head;
  const scores = head.scores();
  let used = definition === "fixed" ? 1 : nIters;
  if (definition === "streaming") used = streamingIterations(nIters);
  const normalise = definition === "streaming" ? streaming : sinkhorn;
  const { weights, steps, converged } = normalise(scores, n, m, used, tau);
  const target = evenSums(head, scores);
  const sums = columnSums(weights, n, m).map((sum, j) => (target[j] > 0 ? sum / target[j] : NaN));
  const { entropies, rowSums } = rowStatistics(weights, n, m);
  const shown = [...sums].filter((sum) => !Number.isNaN(sum));
  return {
    n,
    m,
    weights,
    sums,
    target,
    entropies,
    rowSums,
    nIters: used,
    tau,
    steps,
    converged,
    largestWeight: weights.reduce((a, b) => Math.max(a, b), 0),
    largestSum: Math.max(...shown),
    smallestSum: Math.min(...shown),
    entropy: mean([...entropies].filter((value, i) => rowSums[i] > 0)),
    rowError: Math.max(0, ...[...rowSums].filter((sum) => sum > 0).map((sum) => Math.abs(sum - 1))),
  };
}

// Column sums of even attention: every row, or with rows in order every visible key of a row, counts the same.
function evenSums({ n, m, definition }, scores) {
  const counts = new Float64Array(n);
  const visible = new Float64Array(m);
  const sums = new Float64Array(m);
  for (let i = 0; i < n; i++)
    for (let j = 0; j < m; j++)
      if (scores[i * m + j] !== -Infinity) {
        counts[i] += 1;
        visible[j] += 1;
      }
  if (definition === "streaming") {
    for (let i = 0; i < n; i++)
      for (let j = 0; j < m; j++) if (scores[i * m + j] !== -Infinity) sums[j] += 1 / counts[i];
    return sums;
  }
  const rows = counts.filter((count) => count > 0).length;
  const columns = visible.filter((count) => count > 0).length;
  return visible.map((count) => (count > 0 ? rows / columns : 0));
}

export function columnSums(weights, n, m) {
  const sums = new Float64Array(m);
  for (let i = 0; i < n; i++) for (let j = 0; j < m; j++) sums[j] += weights[i * m + j];
  return sums;
}

// Sums and entropies (in nats) of rows; the entropy is that of the row divided by its sum.
function rowStatistics(weights, n, m) {
  const rowSums = new Float64Array(n);
  const entropies = new Float64Array(n);
  for (let i = 0; i < n; i++) {
    for (let j = 0; j < m; j++) rowSums[i] += weights[i * m + j];
    for (let j = 0; j < m; j++) {
      const share = weights[i * m + j] / rowSums[i];
      if (share > 0) entropies[i] -= share * Math.log(share);
    }
  }
  return { rowSums, entropies };
}

// Return the places of the largest values, in order.
export function largest(values, count) {
  const places = [...values.keys()].filter((place) => !Number.isNaN(values[place]));
  return places.sort((a, b) => values[b] - values[a]).slice(0, count);
}

function mean(values) {
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : 0;
}

export const column = (weights, n, m, j) => Float64Array.from({ length: n }, (_, i) => weights[i * m + j]);
export const row = (weights, m, i) => weights.slice(i * m, (i + 1) * m);
