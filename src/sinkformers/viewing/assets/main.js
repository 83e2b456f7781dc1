// The page: reads the data, builds the panels, and keeps them up to date.
import { readData } from "./data.js";
import { element, isolated } from "./dom.js";
import { decimal } from "./labels.js";
import { makePanel } from "./panel.js";
import { createState, headAt, newPanel, settingsOf } from "./state.js";

function start() {
  const state = createState(readData(document.getElementById("data").textContent));
  const built = [];
  const { data } = state;
  const byId = (id) => document.getElementById(id);
  byId("title").replaceChildren(isolated(data.title));
  byId("facts").replaceChildren(...facts(data));
  setTheme(state, byId("theme"));
  setFromAddress(state);
  setCompare(state, byId("compare"));
  byId("root").checked = state.look.root;
  byId("root").addEventListener("change", (event) =>
    state.change({ look: { ...state.look, root: event.target.checked } }),
  );

  function build() {
    built.splice(0, built.length, ...state.panels.map((panel) => makePanel(state, panel)));
    const panels = byId("panels");
    panels.classList.toggle("two", built.length === 2);
    panels.replaceChildren(...built.map((panel) => panel.section));
    built.forEach((panel) => panel.update());
  }

  // Several changes between two frames are drawn once.
  let waiting = null;
  state.on((changes) => {
    if (changes.has("panels")) return build();
    if (waiting) return changes.forEach((name) => waiting.add(name));
    waiting = new Set(changes);
    return requestAnimationFrame(() => {
      const seen = waiting;
      waiting = null;
      built.forEach((panel) => panel.update(seen));
    });
  });
  build();
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) state.change({ width: (width = window.innerWidth) });
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") state.change({ pinned: false, focus: { query: null, key: null } });
  });
}

// The system's theme, until the button chooses the other one.
function setTheme(state, button) {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const apply = (name) => {
    document.documentElement.dataset.theme = name;
    button.textContent = name === "dark" ? "☀ Light" : "☾ Dark";
    state.change({ look: { ...state.look, theme: name } });
  };
  let chosen = false;
  system.addEventListener("change", () => !chosen && apply(system.matches ? "dark" : "light"));
  button.addEventListener("click", () => {
    chosen = true;
    apply(state.look.theme === "dark" ? "light" : "dark");
  });
  state.setTheme = (name) => {
    chosen = true;
    apply(name);
  };
  apply(system.matches ? "dark" : "light");
}

// SoftMax of the same scores beside the only model, or without it again.
function setCompare(state, button) {
  button.hidden = state.data.models.length > 1;
  button.setAttribute("aria-pressed", String(state.panels.length > 1));
  button.addEventListener("click", () => {
    const compares = state.panels.length === 1;
    button.setAttribute("aria-pressed", String(compares));
    state.change({ panels: compares ? withSoftmax(state) : [state.panels.at(-1)] });
  });
}

function withSoftmax({ panels: [panel], place }) {
  const head = headAt(panel.model, place);
  if (head && settingsOf(panel, head).nIters === 1) panel.nIters = 3;
  return [newPanel(panel.model, 1, 1), panel];
}

// What an address may say after #, such as #layer=2&head=5&n=3&tau=0.5&compare&theme=dark, or &embed inside another page.
function setFromAddress(state) {
  const asked = new URLSearchParams(window.location.hash.slice(1));
  const number = (name) => (asked.has(name) ? Number(asked.get(name)) : null);
  const place = { layer: number("layer") ?? state.place.layer, head: number("head") ?? state.place.head };
  const panel = state.panels.at(-1);
  if (headAt(panel.model, place)) state.place = place;
  const [n, tau] = [asked.get("n") === "inf" ? Infinity : number("n"), number("tau")];
  if (n === Infinity || (Number.isInteger(n) && n >= 1)) panel.nIters = n;
  if (tau !== null && tau >= 0 && tau <= 1) panel.tau = tau;
  if (asked.has("compare") && state.data.models.length === 1) state.panels = withSoftmax(state);
  document.documentElement.toggleAttribute("data-embedded", asked.has("embed"));
  if (["light", "dark"].includes(asked.get("theme"))) state.setTheme(asked.get("theme"));
}

// What the page holds, and how exactly.
function facts(data) {
  const { bits, rounding, models } = data;
  const left = data.left_out ? [`${data.left_out} heads with more even column sums are left out. `] : [];
  const masked = Math.max(...models.flatMap((m) => m.layers.map((l) => l.shape[1] - l.columns.length)));
  const notes = models.flatMap((model) => model.notes.map((note) => element("li", {}, `${model.name}: ${note}`)));
  return [
    element(
      "p",
      {},
      ...left,
      ...(masked > 0 ? [`Masked tokens (${masked}) are left out, which changes no weight. `] : []),
      `The page holds the scores in ${bits} bits, each off by ${decimal(rounding)} at most, and computes the weights from them. `,
      "The sliders change the normalisation of these scores. A model that runs with other settings has other scores in later layers.",
    ),
    ...(notes.length
      ? [element("details", {}, element("summary", {}, "Attention that is not shown"), element("ul", {}, ...notes))]
      : []),
  ];
}

start();
