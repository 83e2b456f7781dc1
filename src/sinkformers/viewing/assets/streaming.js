// Causal attention whose rows are normalised in order, as the library's streaming definition: each query divides out
// the attention that the keys have received so far, relative to what uniform attention would have given them.
import { logSumExp } from "./sinkhorn.js";

export const MOST_STREAMING = 31;

// Return the odd, finite number of normalisations nearest to `nIters` that this definition has.
export function streamingIterations(nIters) {
  const finite = Math.min(nIters, MOST_STREAMING);
  return finite % 2 ? finite : finite - 1;
}

export function streaming(scores, n, m, nIters, tau) {
  const pairs = (nIters - 1) / 2;
  const weights = new Float64Array(n * m);
  const expected = new Float64Array(m);
  const received = Array.from({ length: pairs }, () => new Float64Array(m).fill(-Infinity)); // logarithms
  const g = new Float64Array(m);
  for (let i = 0; i < n; i++) {
    const row = scores.subarray(i * m, (i + 1) * m);
    const valid = [];
    for (let j = 0; j < m; j++) if (row[j] !== -Infinity) valid.push(j);
    if (!valid.length) continue;
    for (const j of valid) {
      expected[j] += 1 / valid.length;
      g[j] = 0;
    }
    const total = () => logSumExp(valid.length, (k) => row[valid[k]] + g[valid[k]]);
    for (const before of received) {
      const normaliser = total();
      for (const j of valid) {
        before[j] = logAddExp(before[j], row[j] - normaliser);
        g[j] = tau * (Math.log(expected[j]) - before[j]);
      }
    }
    const normaliser = total();
    for (const j of valid) weights[i * m + j] = Math.exp(row[j] + g[j] - normaliser);
  }
  return { weights, steps: nIters, converged: true };
}

function logAddExp(a, b) {
  const largest = Math.max(a, b);
  return largest === -Infinity ? largest : largest + Math.log(Math.exp(a - largest) + Math.exp(b - largest));
}
