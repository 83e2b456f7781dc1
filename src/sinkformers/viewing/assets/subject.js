// What is coloured where attention is shown on its tokens: what each receives, or the weights of the token in focus.
import { mostReceived } from "./head_picture.js";
import { tokenLabels } from "./labels.js";
import { column, row } from "./statistics.js";

// Return {values by number of the token, caption, focus} for a number of tokens; values is empty where they are others.
export function onTokens(state, shown, count) {
  const { head, result } = shown;
  const { focus, look } = state;
  const [rowLabels, columnLabels] = head.shape.map((size) => tokenLabels(state.data, size));
  const i = head.rows.indexOf(focus.query ?? -1);
  const j = head.columns.indexOf(focus.key ?? -1);
  if (look.from && j >= 0 && head.shape[0] === count) {
    const caption = `who looks at “${columnLabels.short(focus.key)}”`;
    return by(head.rows, column(result.weights, head.n, head.m, j), caption, focus.key);
  }
  if (!look.from && i >= 0 && head.shape[1] === count) {
    return by(
      head.columns,
      row(result.weights, head.m, i),
      `where “${rowLabels.short(focus.query)}” looks`,
      focus.query,
    );
  }
  if (head.shape[1] === count) {
    return {
      ...by(head.columns, result.sums, "what each token receives (column sums)", null),
      most: mostReceived(shown),
    };
  }
  return { values: new Map(), most: 1, caption: "this layer attends to other tokens", focus: null };
}

function by(ids, values, caption, focus) {
  const found = new Map(ids.map((id, place) => [id, values[place]]));
  return {
    values: found,
    most: Math.max(...[...found.values()].filter((value) => !Number.isNaN(value)), 1e-12),
    caption,
    focus,
  };
}

// Point at a token as query and as key, or stop.
export function pointAt(state, id) {
  if (!state.pinned) state.change({ focus: { query: id, key: id } });
}
