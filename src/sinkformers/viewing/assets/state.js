// What is shown: the place (layer and head), the panels with their settings, the token in focus, and the look.
import { attention } from "./statistics.js";

// A panel shows one model with its own settings, or with those of the sliders where they were moved.
export function createState(data) {
  const listeners = [];
  const state = {
    data,
    place: leastEven(data.models.at(-1)),
    panels: data.models.map((model) => newPanel(model)),
    focus: { query: null, key: null },
    pinned: false,
    look: { theme: "light", root: true },
    on: (listener) => listeners.push(listener),
    // Change some of the above; listeners are told the names of what has changed.
    change(changes) {
      Object.assign(state, changes);
      for (const listener of listeners) listener(new Set(Object.keys(changes)));
    },
  };
  return state;
}

export function newPanel(model, nIters = null, tau = null) {
  return { model, nIters, tau };
}

export function headAt(model, place) {
  return model.layers.find((layer) => layer.number === place.layer)?.heads.find((head) => head.number === place.head);
}

export const layerAt = (model, place) => model.layers.find((layer) => layer.number === place.layer);

// The settings of a head in a panel: the sliders', or those with which the model normalises it.
export function settingsOf(panel, head) {
  return { nIters: panel.nIters ?? head.own.nIters, tau: panel.tau ?? head.own.tau };
}

// The head of a panel at a place, with its weights, those of the last call again if nothing has changed.
export function shownIn(panel, place) {
  const head = headAt(panel.model, place);
  if (!head) return null;
  const settings = settingsOf(panel, head);
  const last = panel.shown;
  if (last?.head === head && last.settings.nIters === settings.nIters && last.settings.tau === settings.tau)
    return last;
  const result = attention(head, settings);
  const softmax = last?.head === head ? last.softmax : attention(head, { nIters: 1, tau: 1 });
  panel.shown = { head, settings, result, softmax };
  return panel.shown;
}

// The place of the head whose column sums are the least even under SoftMax: there Sinkhorn changes the most.
function leastEven(model) {
  const heads = model.layers.flatMap((layer) => layer.heads);
  const found = heads.reduce((best, head) => (head.uneven > best.uneven ? head : best));
  return { layer: found.layer, head: found.number };
}
