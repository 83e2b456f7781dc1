// Sinkhorn's algorithm on one matrix, as the library defines it: rows first, then columns, then rows, …
// With scores C, f and g start at 0. Rows: f = −LSE_j(C + g). Columns: g = −τ·(LSE_i(C + f) − log ρ), where ρ is the
// number of valid rows over that of valid columns. The weights are exp(C + f + g).

const TOLERANCE = 1e-5; // at the limit: of the logarithms of column sums
const MOST_WORK = 4e8; // at the limit: entries read, about a second
const MOST_STEPS = 20000;
const SAFE_SHIFT = -600; // of a column; e^−700 is the smallest double
const SAFE_SCALE = 1e140; // of a scaling: products of two, and their inverses, stay finite

// Return {weights, steps, converged} of scores (n·m numbers by rows, −Infinity where masked). `nIters` may be Infinity.
export function sinkhorn(scores, n, m, nIters, tau) {
  const problem = pose(scores, n, m);
  return kernelDomain(problem, nIters, tau) ?? logDomain(problem, nIters, tau);
}

// Rows less their maxima, which rows and columns are valid, and log ρ.
function pose(scores, n, m) {
  const shifted = new Float64Array(scores.length);
  const rows = new Uint8Array(n);
  const top = new Float64Array(m).fill(-Infinity); // the maximum of each column after the shift
  for (let i = 0; i < n; i++) {
    let largest = -Infinity;
    for (let j = 0; j < m; j++) largest = Math.max(largest, scores[i * m + j]);
    rows[i] = largest > -Infinity ? 1 : 0;
    for (let j = 0; j < m; j++) {
      const score = rows[i] ? scores[i * m + j] - largest : -Infinity;
      shifted[i * m + j] = score;
      top[j] = Math.max(top[j], score);
    }
  }
  const columns = Uint8Array.from(top, (value) => (value > -Infinity ? 1 : 0));
  const count = (valid) => valid.reduce((sum, one) => sum + one, 0);
  return { n, m, scores: shifted, rows, columns, top, rho: count(rows) / Math.max(1, count(columns)) };
}

// Scalings u and v of A = exp(C − top), which is exponentiated once; null where they leave the range of doubles.
function kernelDomain({ n, m, scores, rows, columns, top, rho }, nIters, tau) {
  for (let j = 0; j < m; j++) if (columns[j] && top[j] < SAFE_SHIFT) return null;
  const kernel = new Float64Array(n * m);
  for (let i = 0; i < n; i++)
    for (let j = 0; j < m; j++) if (rows[i] && columns[j]) kernel[i * m + j] = Math.exp(scores[i * m + j] - top[j]);
  const u = new Float64Array(n);
  const v = Float64Array.from(top, (value, j) => (columns[j] ? Math.exp(value) : 0));
  const sums = new Float64Array(m);

  const rowStep = () => {
    for (let i = 0; i < n; i++) {
      let sum = 0;
      for (let j = 0; j < m; j++) sum += kernel[i * m + j] * v[j];
      u[i] = rows[i] ? 1 / sum : 0;
    }
  };
  const columnStep = () => {
    sums.fill(0);
    for (let i = 0; i < n; i++) for (let j = 0; j < m; j++) sums[j] += u[i] * kernel[i * m + j];
    const change = range();
    for (let j = 0; j < m; j++) {
      if (!columns[j]) continue;
      const next = Math.pow(rho / sums[j], tau) * Math.exp((1 - tau) * top[j]);
      change.add(Math.log(next / v[j]));
      v[j] = next;
    }
    return change.width();
  };
  const done = alternate(rowStep, columnStep, n * m, nIters);
  const safe = (value) => value > 1 / SAFE_SCALE && value < SAFE_SCALE;
  for (let i = 0; i < n; i++) if (rows[i] && !safe(u[i])) return null;
  for (let j = 0; j < m; j++) if (columns[j] && nIters > 1 && !safe(v[j])) return null;
  const weights = kernel; // in place
  for (let i = 0; i < n; i++) for (let j = 0; j < m; j++) weights[i * m + j] *= u[i] * v[j];
  return { weights, ...done };
}

// Potentials f and g, for scores of any size.
function logDomain({ n, m, scores, rows, columns, rho }, nIters, tau) {
  const f = new Float64Array(n);
  const g = new Float64Array(m);
  const logRho = Math.log(rho);
  const rowStep = () => {
    for (let i = 0; i < n; i++) if (rows[i]) f[i] = -logSumExp(m, (j) => scores[i * m + j] + g[j]);
  };
  const columnStep = () => {
    const change = range();
    for (let j = 0; j < m; j++) {
      if (!columns[j]) continue;
      const next = -tau * (logSumExp(n, (i) => scores[i * m + j] + f[i]) - logRho);
      change.add(next - g[j]);
      g[j] = next;
    }
    return change.width();
  };
  const done = alternate(rowStep, columnStep, 8 * n * m, nIters);
  const weights = scores.map((score, place) => {
    const potential = f[Math.floor(place / m)] + g[place % m];
    return score === -Infinity ? 0 : Math.exp(score + potential);
  });
  return { weights, ...done };
}

// Make `nIters` steps; for Infinity, pairs of steps until the columns change by one factor, and rows at the end.
function alternate(rowStep, columnStep, workOfStep, nIters) {
  if (nIters !== Infinity) {
    for (let step = 0; step < nIters; step++) (step % 2 ? columnStep : rowStep)();
    return { steps: nIters, converged: true };
  }
  let change = Infinity;
  let steps = 0;
  const most = Math.min(MOST_STEPS, Math.max(100, Math.floor(MOST_WORK / workOfStep)));
  while (change > TOLERANCE && steps < most) {
    rowStep();
    change = columnStep();
    steps += 2;
    if (Number.isNaN(change)) break;
  }
  rowStep();
  return { steps: steps + 1, converged: change <= TOLERANCE };
}

export function logSumExp(count, term) {
  let largest = -Infinity;
  for (let k = 0; k < count; k++) largest = Math.max(largest, term(k));
  if (largest === -Infinity) return -Infinity;
  let sum = 0;
  for (let k = 0; k < count; k++) sum += Math.exp(term(k) - largest);
  return largest + Math.log(sum);
}

function range() {
  let low = Infinity;
  let high = -Infinity;
  return {
    add(value) {
      if (Number.isNaN(value)) low = NaN;
      if (value < low) low = value;
      if (value > high) high = value;
    },
    width: () => high - low,
  };
}
