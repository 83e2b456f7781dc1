// The sliders of a panel.
import { element } from "./dom.js";
import { decimal, iterations } from "./labels.js";
import { settingsOf } from "./state.js";

const MOST_ITERATIONS = 31; // the next place of the slider is the limit
const PAUSE = 450; // milliseconds between two numbers of iterations

const toPlace = (nIters) => (nIters === Infinity ? MOST_ITERATIONS + 1 : Math.min(MOST_ITERATIONS, nIters));
const toIterations = (place) => (place > MOST_ITERATIONS ? Infinity : place);

// `change(settings)` sets those of the panel: {nIters, tau}, null for the model's own.
export function makeControls(panel, change) {
  const name = (text, code) => element("span", { class: "label" }, text, element("code", {}, code));
  const slider = (options) => element("input", { type: "range", ...options });
  const counts = slider({ min: 1, max: MOST_ITERATIONS + 1, step: 1, class: "iterations", "aria-label": "n_iters" });
  const taus = slider({ min: 0, max: 1, step: 0.01, class: "tau", "aria-label": "tau" });
  const [count, tau] = [element("output"), element("output")];
  const play = element("button", { type: "button", class: "play" }, "▶ Play");
  const own = element(
    "button",
    { type: "button", class: "own", title: "The settings of the model" },
    "As in the model",
  );
  const note = element("p", { class: "note", role: "status" });
  let timer = null;

  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = "▶ Play";
  }
  function step() {
    const place = Number(counts.value);
    if (!play.isConnected || place > MOST_ITERATIONS) return stop();
    return change({
      nIters: toIterations(place < 7 ? place + 1 : Math.min(MOST_ITERATIONS + 1, place + 4)),
      tau: panel.tau,
    });
  }
  counts.addEventListener("input", () => {
    stop();
    change({ nIters: toIterations(Number(counts.value)), tau: panel.tau });
  });
  taus.addEventListener("input", () => change({ nIters: panel.nIters, tau: Number(taus.value) }));
  own.addEventListener("click", () => {
    stop();
    change({ nIters: null, tau: null });
  });
  play.addEventListener("click", () => {
    if (timer) return stop();
    play.textContent = "❚❚ Pause";
    change({ nIters: 1, tau: panel.tau });
    timer = setInterval(step, PAUSE);
    return undefined;
  });

  function update({ head, result }) {
    const settings = settingsOf(panel, head);
    const fixed = head.definition === "fixed";
    for (const input of [counts, taus, play]) input.disabled = fixed;
    counts.value = toPlace(settings.nIters);
    taus.value = settings.tau;
    count.textContent = iterations(result.nIters);
    tau.textContent = decimal(settings.tau);
    counts.setAttribute("aria-valuetext", settings.nIters === 1 ? "1, SoftMax" : iterations(settings.nIters));
    own.disabled = panel.nIters === null && panel.tau === null;
    note.textContent = noteOn(head, settings, result);
  }
  const box = element(
    "div",
    { class: "controls" },
    element("label", {}, name("Normalisations ", "n_iters"), counts, count),
    element("label", {}, name("Columns ", "tau"), taus, tau),
    element("div", { class: "buttons" }, play, own),
    note,
  );
  return { element: box, update };
}

function noteOn(head, settings, result) {
  if (head.definition === "fixed")
    return "This layer normalises in a way of its own: its weights are shown as they are.";
  if (head.definition === "streaming" && settings.nIters !== result.nIters) {
    return `Rows are normalised in order here, with an odd number of normalisations: ${result.nIters} are made.`;
  }
  if (settings.nIters === 1) return "SoftMax: each row sums to 1, and a column to whatever it collects.";
  if (settings.tau === 0) return "With tau 0 columns are not normalised: this is SoftMax.";
  if (head.definition === "streaming")
    return "Rows are normalised in order: each query divides out what the keys have received so far.";
  if (settings.nIters === Infinity && settings.tau < 1)
    return "The limit: columns are drawn to even shares, but not forced.";
  if (settings.nIters === Infinity && result.converged) return "The limit: rows and columns both have their sums.";
  if (settings.nIters === Infinity)
    return "The limit was not reached: the column sums are still on their way, or have no limit.";
  if (settings.nIters % 2 === 0)
    return "Columns have their sums. Rows come closer to 1 with each further pair of steps.";
  return "Rows sum to 1. Columns come closer to even shares with each further pair of steps.";
}
