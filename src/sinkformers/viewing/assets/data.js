// The data of the page: models, layers and heads, with scores that are decoded when they are first needed.

export function readData(source) {
  const data = JSON.parse(source);
  const bytes = decodeBase64(data.scores);
  delete data.scores;
  const models = data.models.map((model) => ({
    ...model,
    layers: model.layers.map((layer) => readLayer(layer, bytes, data.bits)),
  }));
  const step = Math.max(
    0,
    ...models.flatMap((model) => model.layers.flatMap((layer) => layer.heads.map((h) => h.step))),
  );
  return { ...data, models, rounding: step / 2 };
}

export function decodeBase64(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let k = 0; k < binary.length; k++) bytes[k] = binary.charCodeAt(k);
  return bytes;
}

function readLayer(layer, bytes, bits) {
  const n = layer.rows.length;
  const m = layer.columns.length;
  const common = { n, m, definition: layer.definition, rows: layer.rows, columns: layer.columns, shape: layer.shape };
  const heads = layer.heads.map((head) => {
    const own = { nIters: head.n_iters === "inf" ? Infinity : head.n_iters, tau: head.tau };
    let scores = null;
    const decoded = () => (scores ??= decodeScores(bytes, head, n * m, bits));
    return {
      ...common,
      layer: layer.number,
      number: head.number,
      step: head.step,
      uneven: head.uneven,
      own,
      scores: decoded,
    };
  });
  return { ...layer, heads };
}

// Scores, each row less its maximum; −Infinity where masked. A score takes one byte, or two with the lower one first.
export function decodeScores(bytes, { start, low, step }, count, bits) {
  const scores = new Float64Array(count);
  for (let k = 0; k < count; k++) {
    const code = bits === 8 ? bytes[start + k] : bytes[start + 2 * k] + 256 * bytes[start + 2 * k + 1];
    scores[k] = code === 0 ? -Infinity : low + (code - 1) * step;
  }
  return scores;
}
